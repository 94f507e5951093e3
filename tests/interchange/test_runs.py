"""A run becomes one file and a run folder again, in whole or not at all."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxblt
from jaxblt.adapters import AdapterConfig, attach
from jaxblt.cli.main import main
from jaxblt.interchange import read_run, write_run
from jaxblt.interchange.runs import alone
from jaxblt.interchange.tensors import write_tensors
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.seals import HASH, MARK, UnsealedWarning, seal
from jaxblt.training.experimental.hybrid import HybridNextByte
from jaxblt.training.objectives.reference import ReferenceConfig
from jaxblt.training.stored.checkpoint import restore
from tests.flipped import flips
from tests.interchange.clean import NAMES, logits_of
from tests.interchange.conftest import ask_clean_process
from tests.training.tiny import tiny_recipe


def text_of(file) -> dict[str, str]:
    with safe_open(file, framework="np") as opened:
        return opened.metadata()


def changed(file, out, edit) -> Path:
    """A copy of a file after `edit(arrays, text)`, sealed anew."""
    arrays, text = load_file(file), text_of(file)
    del text[MARK], text[HASH]
    edit(arrays, text)
    save_file(arrays, out, seal(arrays, text))
    return out


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_programs")
def test_a_clean_process_reads_the_same_logits(runs, files, found):
    np.testing.assert_allclose(found["bytes"], logits_of(runs["bytes"]), rtol=0, atol=1e-6)
    assert not list(files.glob(".*"))


@pytest.mark.slow(days=28, group="processes of their own")
def test_a_clean_process_reads_the_same_logits_through_patches(runs, files):
    found = ask_clean_process(files, "patches")
    np.testing.assert_allclose(found["patches"], logits_of(runs["patches"]), rtol=0, atol=1e-6)


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_runs")
@pytest.mark.parametrize("name", NAMES)
def test_bits_recipe_step_and_hashes_come_back(runs, files, name):
    run, again = runs[name], jaxblt.load(files / name)
    assert (again.step, again.recipe) == (run.step, run.recipe)
    assert {n: t.content_hash for n, t in again.frozen.items()} == {
        n: t.content_hash for n, t in run.frozen.items()
    }
    for tree, other in ((run.params, again.params), (run.frozen, again.frozen)):
        jax.tree.map(np.testing.assert_array_equal, tree, other)
    arrays, text = load_file(files / f"{name}.safetensors"), text_of(files / f"{name}.safetensors")
    assert {x.dtype for key, x in arrays.items() if key.startswith("model.")} == {np.dtype(np.float32)}
    rest = {x.dtype for key, x in arrays.items() if key.startswith("frozen.entropy.")}
    assert rest == ({jnp.dtype("bfloat16")} if run.frozen else set())
    assert (text["step"], json.loads(text["recipe"])["class"]) == (str(run.step), "recipe")


@pytest.mark.parametrize(
    "of_recipe",
    [{"init_from": "elsewhere", "freeze": ("embedding/*",)}, {"base_run": "elsewhere", "also_train": ("x",)}],
)
def test_averages_and_frozen_bases_are_written_as_the_model(runs, tmp_path, of_recipe):
    run = runs["bytes"]
    train = replace(run.recipe.train, ema=0.9)
    run = replace(run, recipe=replace(run.recipe, train=train, **of_recipe), weights="ema")
    write_run(run, tmp_path / "a.safetensors")
    read_run(tmp_path / "a.safetensors", tmp_path / "again")
    again = jaxblt.load(tmp_path / "again")
    assert again.recipe.train.ema is None
    assert (again.recipe.base_run, again.recipe.freeze, again.weights) == (None, (), "raw")
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)


def test_half_the_size_in_bfloat16(runs, tmp_path):
    run = runs["bytes"]
    wide = write_run(run, tmp_path / "wide.safetensors").size
    assert write_run(run, tmp_path / "half.safetensors", dtype="bfloat16").size < 0.6 * wide
    read_run(tmp_path / "half.safetensors", tmp_path / "again")
    again = restore(tmp_path / "again" / "checkpoints", run.params, subtree="params").state
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), run.params)
    jax.tree.map(np.testing.assert_array_equal, again, rounded)


def test_one_error_names_every_entry_that_does_not_fit(files, tmp_path):
    def edit(arrays, text):
        del arrays["model.head.norm.scale"]
        arrays["model.more"] = arrays["model.other"] = np.zeros(2, np.float32)
        arrays["model.stack.rest.x"] = arrays.pop("model.stack.periods.block_0.mixer_norm.scale")
        arrays["model.embedding.bytes"] = arrays["model.embedding.bytes"][:-1].astype(np.float16)

    file = changed(files / "bytes.safetensors", tmp_path / "a.safetensors", edit)
    with pytest.raises(ValueError, match="does not hold the model of its recipe") as caught:
        read_run(file, tmp_path / "run")
    said = str(caught.value)
    assert "missing model.head.norm.scale, model.stack.periods.block_0.mixer_norm.scale;" in said
    assert "unexpected model.more, model.other, model.stack.rest.x;" in said
    assert "wrong shape: model.embedding.bytes is (259, 16), expected (260, 16);" in said
    assert "wrong dtype: model.embedding.bytes is float16, expected float32" in said
    assert "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_cannot_be_read_leaves_nothing(files, tmp_path):
    def other_entropy(arrays, text):
        name = "frozen.entropy.embedding.bytes"
        arrays[name] = arrays[name] + arrays[name].dtype.type(1)

    def no_recipe(arrays, text):
        text["recipe"] = "{}"

    def too_deep(arrays, text):
        text["frozen"] = "[" * 100_000

    def before_the_first(arrays, text):
        text["step"] = "-3"

    def another_format(arrays, text):
        text["format"] = "pt"

    for name, edit, says in (
        ("patches", other_entropy, "holds another frozen 'entropy' than was exported"),
        ("bytes", no_recipe, "text that cannot be read: config has no"),
        ("bytes", too_deep, "text that cannot be read: .*recursion"),
        ("bytes", before_the_first, "text that cannot be read: step must .*, got -3"),
        ("bytes", another_format, "has format 'pt', expected 'jaxblt'"),
    ):
        file = changed(files / f"{name}.safetensors", tmp_path / "a.safetensors", edit)
        with pytest.raises(ValueError, match=says):
            read_run(file, tmp_path / "run")
    (tmp_path / "a.safetensors").write_bytes(b"12345678" * 9)
    with pytest.raises(ValueError, match="is no safetensors file: "):
        read_run(tmp_path / "a.safetensors", tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_run(tmp_path / "none", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_changed_bit_is_an_error(files, tmp_path):
    file = Path(shutil.copy(files / "bytes.safetensors", tmp_path))
    for bit in flips(file):
        with pytest.raises(ValueError) as caught:
            read_run(file, tmp_path / "run")
        assert "\n" not in str(caught.value), bit
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_file_of_an_earlier_version_is_read_with_a_word(files, tmp_path):
    arrays, text = load_file(files / "bytes.safetensors"), text_of(files / "bytes.safetensors")
    del text[MARK], text[HASH]
    save_file(arrays, tmp_path / "a.safetensors", text)
    with pytest.warns(
        UnsealedWarning, match="a.safetensors is of an earlier version and has no hash"
    ) as said:
        read_run(tmp_path / "a.safetensors", tmp_path / "again")
    assert len(said) == 1
    arrays["model.head.norm.scale"][3] = np.nan
    save_file(arrays, tmp_path / "a.safetensors", text)
    with (
        pytest.warns(UnsealedWarning),
        pytest.raises(ValueError, match=r"model.head.norm.scale holds nan at \[3\], expected finite numbers"),
    ):
        read_run(tmp_path / "a.safetensors", tmp_path / "run")


def test_parameters_that_are_not_finite_are_not_written(runs, tmp_path):
    run = runs["bytes"]
    broken = replace(run, params=jax.tree.map(lambda x: x * np.nan, run.params))
    with pytest.raises(ValueError, match=r"model\.\S+ holds nan at \[0"):
        write_run(broken, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_commands_say_what_they_wrote_and_overwrite_nothing(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["import", str(files / "bytes.safetensors"), "--out", "run"])
    assert "jaxblt.load('run') opens it" in capsys.readouterr().out
    main(["export", "run", "--out", "a.safetensors"])
    size = (tmp_path / "a.safetensors").stat().st_size
    assert f"arrays of step 7, {size:,} bytes" in capsys.readouterr().out
    first, again = files / "bytes.safetensors", tmp_path / "a.safetensors"
    assert text_of(first) == text_of(again)
    jax.tree.map(np.testing.assert_array_equal, load_file(first), load_file(again))
    for argv, error, says in (
        (["export", "run", "--out", "a.safetensors"], FileExistsError, "nothing is overwritten"),
        (["export", "run", "--out", "away/a"], FileNotFoundError, "there is no folder 'away'"),
        (["export", "run", "--out", "b", "--step", "-1"], ValueError, "--step must be at least 0, got -1"),
        (["export", "none", "--out", "b"], FileNotFoundError, "none holds no run"),
        (["import", "a.safetensors", "--out", "run"], FileExistsError, "nothing is overwritten"),
    ):
        with pytest.raises(error, match=says):
            main(argv)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "run"]


def test_what_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a is complex64, expected one of float32, "):
        write_tensors(tmp_path / "a", {"a": np.zeros(1, np.complex64)}, {})
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_tensors(tmp_path / "b", {"b": turned, "c": np.float32(2)}, {})
    np.testing.assert_array_equal(load_file(tmp_path / "b")["b"], turned)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_file_stands_without_what_its_run_was_trained_with():
    """A reference without a run is the base, which a file does not name."""
    model = attach(
        ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern=("recurrence",))), AdapterConfig(rank=2)
    )
    trained = tiny_recipe(
        model=model,
        base_run="runs/base",
        experts=("runs/lora",),
        reference=ReferenceConfig(),
        objective=HybridNextByte(reference=((0, 1.0), (10, 0.0))),
    )
    wanted = tiny_recipe(model=model)
    assert alone(trained) == wanted
