"""Parts of a random `BltForCausalLM` compute here what transformers computed; see make_hf_blt.py."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxblt
from jaxblt.cli.main import main
from jaxblt.interchange import read_global, read_patcher
from jaxblt.models.stack import Stack
from jaxblt.patching import make_patches
from jaxblt.patching.logits import entropies_from_logits

FIXTURE = Path(__file__).parent / "hf_blt"


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """What transformers makes of some bytes."""
    return load_file(FIXTURE / "expected.safetensors")


def check_patcher(folder: Path, expected: dict[str, np.ndarray], ids, entropies) -> None:
    """Entropies, and patches cut by those of transformers, are its."""
    np.testing.assert_allclose(entropies, expected["entropies"], rtol=1e-5)
    patches = make_patches(read_patcher(folder).patcher, ids, entropies=jnp.asarray(expected["entropies"]))
    # In a batch transformers lets the last patch of a row with fewer patches end a byte behind the row
    ends = np.minimum(np.cumsum(expected["patch_lengths"], 1), ids.shape[1])
    for row, own in zip(np.asarray(patches.lengths)[:, 0], ends, strict=True):
        assert np.cumsum(row[row > 0]).tolist() == np.unique(own).tolist()


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_hf_blt")
def test_an_imported_patcher_is_an_entropy_model(expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["import", str(FIXTURE), "--part", "patcher", "--out", "entropy"])
    assert "its patches have threshold 5.13 nats, max_length 5" in capsys.readouterr().out
    run = jaxblt.load("entropy")
    ids = jnp.asarray(expected["ids"])
    logits, _ = jax.jit(run.model.apply)({"params": run.params}, ids)
    np.testing.assert_allclose(logits, expected["patcher_logits"], rtol=1e-5, atol=1e-5)
    check_patcher(FIXTURE, expected, ids, entropies_from_logits(logits))
    assert [path.name for path in tmp_path.iterdir()] == ["entropy"]


def test_the_global_transformer_is_a_stack(expected):
    config, params = read_global(FIXTURE)
    out, _ = jax.jit(Stack(config).apply)({"params": params}, jnp.asarray(expected["global_in"]))
    np.testing.assert_allclose(out, expected["global_out"], rtol=1e-5, atol=2e-5)


def test_the_whole_model_is_refused_with_every_difference(tmp_path):
    with pytest.raises(ValueError, match="which no BLTConfig describes: a patch asks its bytes") as caught:
        main(["import", str(FIXTURE), "--out", str(tmp_path / "run")])
    assert "add --part patcher" in str(caught.value)
    assert not list(tmp_path.iterdir())


def copied(folder: Path, *, drop: str = "", spoil: str = "", **settings) -> Path:
    """The fixture with other settings of its patcher, without a weight, or with NaN in one."""
    folder.mkdir()
    config = json.loads((FIXTURE / "config.json").read_text())
    config["patcher_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    arrays = load_file(FIXTURE / "model.safetensors")
    arrays.pop(drop, None)
    if spoil:
        arrays[spoil] = arrays[spoil] * np.nan
    half = len(arrays) // 2
    shards = {"a.safetensors": list(arrays)[:half], "b.safetensors": list(arrays)[half:]}
    for file, names in shards.items():
        save_file({name: arrays[name].astype(np.float16) for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_and_half_precision_are_read(tmp_path):
    sharded, one = read_patcher(copied(tmp_path / "a")), read_patcher(FIXTURE)
    assert sharded.recipe == one.recipe
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(np.float16).astype(np.float32)),
        sharded.params,
        one.params,
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": "model.patcher.norm.weight"}, "the patcher of its config: missing norm.weight"),
        ({"num_hidden_layers": 1}, "unexpected layers.1.input_layernorm.weight, "),
        (
            {"num_key_value_heads": 2},
            r"shape: layers.0.self_attn.k_proj.weight is \(8, 16\), expected \(16, 16\)",
        ),
        ({"hidden_act": "gelu"}, "patcher_config.hidden_act is 'gelu', expected 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn', expected 'default'"),
        (
            {"spoil": "model.patcher.norm.weight"},
            r"model.patcher.norm.weight holds nan at \[0\], expected finite",
        ),
        ({"hidden_size": "16"}, "patcher_config.hidden_size is '16', expected a whole number"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        read_patcher(copied(tmp_path / "a", **change))


@pytest.mark.parametrize("given", [{}, {"patching_threshold": None}])
def test_a_threshold_is_not_made_up(tmp_path, given):
    folder = copied(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    del config["patching_threshold"]
    (folder / "config.json").write_text(json.dumps(config | given))
    with pytest.raises(ValueError, match="patching_threshold None, expected a number of nats"):
        read_patcher(folder)


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a Hugging Face model"):
        read_patcher(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type 'llama', expected 'blt'"):
        read_patcher(tmp_path)


@pytest.mark.slow(days=28, group="long")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_fixture_is_what_transformers_makes(expected, tmp_path):
    from tests.interchange import make_hf_blt

    make_hf_blt.main(tmp_path)
    again = load_file(tmp_path / "expected.safetensors")
    for name, x in expected.items():
        np.testing.assert_allclose(again[name], x, rtol=1e-5, atol=1e-5)
    shutil.rmtree(tmp_path)
