"""Python in guides that load runs, with what they would call in place of a run."""

import inspect
import re
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxblt
import jaxblt.adapters
import jaxblt.inference
from configs import RECIPES, get
from jaxblt.data import DocumentSource
from jaxblt.inference.requests import lay_out
from jaxblt.models.mixer_table import WORDS
from jaxblt.testing.conformance import PROMISES
from jaxblt.training.flops import count_params
from jaxblt.training.log.report import _adapters
from jaxblt.training.start.base import trained_part
from jaxblt.training.start.setup import Setup, make_task
from jaxblt.training.state import start
from tests.data.tasks.stories import write_stories
from tests.docs.documents import ROOT, blocks
from tests.tolerances import assert_close

GUIDES = ROOT / "docs" / "guides"
EXAMPLES = pytest.mark.slow(days=28, group="pages and gates of benchmarks")


@EXAMPLES
def test_run_md_mixes_sources_and_streams(monkeypatch):
    asked = []

    def generate(decoder, params, prompts, *, max_new_bytes, sampling, stream):
        asked.append(lay_out(prompts, max_new_bytes, sampling, 0))
        assert stream
        yield [b"one", b"two"]

    assert (
        inspect.signature(generate).parameters.keys()
        <= inspect.signature(jaxblt.inference.generate).parameters.keys()
    )
    monkeypatch.setattr(jaxblt.inference, "generate", generate)
    names = {"run": SimpleNamespace(decoder=None, decoder_params=None)}
    for text in blocks(GUIDES / "run.md", "python"):
        exec(compile(text, "run.md", "exec"), names)
    assert [source.name for source in names["data"].sources] == ["books", "genome"]
    assert (names["first"], names["second"], len(asked)) == (b"one", b"two", 1)


def test_remote_md_loads_a_run(monkeypatch):
    signature, calls = inspect.signature(jaxblt.load), []
    monkeypatch.setattr(
        jaxblt, "load", lambda *args, **options: calls.append(signature.bind(*args, **options))
    )
    for text in blocks(GUIDES / "remote.md", "python"):
        exec(compile(text, "remote.md", "exec"), {})
    assert [call.arguments["run_dir"] for call in calls] == ["s3://bucket/runs/books"]


@pytest.mark.slow(days=28, group="costly", turn="docs/test_guides")
def test_parts_md_uses_parts_by_themselves(capsys):
    """Its table has every name that a pattern may have, and the packages of all operations."""
    names = {}
    for text in blocks(GUIDES / "parts.md", "python"):
        exec(compile(text, "parts.md", "exec"), names)
    patterns, cell, equal, turns, slots, patches, kmers, said, beta, scan = (
        capsys.readouterr().out.splitlines()
    )
    assert turns == "16 numbers of a slot become one of 256 codes"
    assert (patterns, cell, equal, slots) == ("J ('state_engine',)", "gru", "True", "(1, 1, 1)")
    assert (patches, kmers) == ("True True", "7 b'ACGTTNacg'")
    assert said.startswith("linear_scan: ")
    assert beta.startswith("gated_delta_rule: beta must lie in 0..2, got 2.5 at [0 0 0]: pass")
    assert scan.startswith("linear_scan: a must be finite, got nan at [0 3 5]: ")
    first_cells = re.findall(
        r"^\| (`.*?) \|", (GUIDES / "parts.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    ops = {path.parent.name for path in (ROOT / "pallas_kernels").glob("*/README.md")}
    assert {*WORDS, *ops} == shown


def test_benchmark_md_measures_a_program(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(GUIDES / "benchmark.md", "python")
    names = {}
    exec(compile(example, "benchmark.md", "exec"), names)
    memory, *ops, window, _, _, step, product = capsys.readouterr().out.splitlines()
    assert (step.split()[0], product.split()[:2]) == ("step", ["step/product", "1"])
    assert re.fullmatch(r"device .* GiB, host .* GiB", memory)
    assert 1 <= len(ops) <= 3
    assert window.startswith("WindowReport(count=20, ")
    assert names["memory"].device_peak >= names["x"].nbytes


def test_sources_md_makes_rows(capsys):
    names = {}
    for text in blocks(GUIDES / "sources.md", "python"):
        exec(compile(text, "sources.md", "exec"), names)
    first, mixed, answers, own = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ rows; b['\"].*", first)
    assert (mixed, answers, own) == ("(8, 64)", "32 answers are scored", "(4, 64)")
    assert isinstance(names["Letters"](), DocumentSource)
    with pytest.raises(IndexError, match="document 3 has 512 bytes"):
        names["Letters"]().read(3, 500, 600)


def test_boundaries_md_scores_cuts(capsys):
    for text in blocks(GUIDES / "boundaries.md", "python"):
        exec(compile(text, "boundaries.md", "exec"), {})
    told, level, same, late = capsys.readouterr().out.splitlines()
    assert told == "content_similarity learned 4.5"
    assert level == "1024 2.0"
    assert same == "1.0"
    exact, near = map(float, late.split())
    assert exact < 0.1 < 0.9 < near


@EXAMPLES
def test_state_engines_md_streams(capsys):
    names = {}
    for text in blocks(GUIDES / "state-engines.md", "python"):
        exec(compile(text, "state-engines.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == [
        "equal: True",
        "keys of slots: (2, 4, 16, 16)",
        "12 slots in levels of (8, 4) - edges every 16 tokens",
    ]
    page = (GUIDES / "state-engines.md").read_text(encoding="utf-8")
    options = set(re.findall(r"`(\w+)=", page.partition("## Options")[2]))
    assert options <= {field.name for field in fields(names["StateEngineConfig"])}


@EXAMPLES
def test_write_an_operation_md_holds_a_whole_operation(capsys):
    page, names = GUIDES / "write-an-operation.md", {}
    for text in blocks(page, "python"):
        exec(compile(text, "write-an-operation.md", "exec"), names)
    assert capsys.readouterr().out == blocks(page, "text")[-1]
    with pytest.raises(ValueError, match=re.escape("ema: decay must lie in 0..1, got 1.5 at [0]")) as refused:
        names["ema"](names["x"], names["decay"] + 1.4)
    assert str(refused.value) in page.read_text(encoding="utf-8")


@EXAMPLES
def test_nnx_md_trains():
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # Adam of optax counts steps in int32
        for text in blocks(GUIDES / "nnx.md", "python"):
            exec(compile(text, "nnx.md", "exec"), names)
    assert_close(jnp.concatenate([names["first"], names["second"]], 1), names["y"], n=12 * 16)
    assert names["losses"][-1] < names["losses"][0]


@EXAMPLES
@pytest.mark.usefixtures("symbolic_sizes")
def test_own_programs_md_splits_and_exports():
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # Adam of optax counts steps in int32
        for text in blocks(GUIDES / "own-programs.md", "python"):
            exec(compile(text, "own-programs.md", "exec"), names)
    whole, _ = names["module"].apply(names["variables"], names["x"])
    for found in (names["y"], names["program"].call(names["variables"], names["x"])):
        assert_close(found, whole, n=whole.shape[1] * 16)


def said_first(recipe) -> str:
    """What a run over a base prints first; shapes are made for it, and no parameters."""
    task, ids = make_task(recipe), jnp.zeros((1, 512), jnp.int32)
    options = {} if recipe.patcher is None else {"entropies": jnp.zeros(ids.shape)}
    whole = jax.eval_shape(partial(task.model.init, **options), jax.random.key(0), ids)["params"]
    setup = Setup(
        recipe,
        Mesh(jax.devices()[:1], "data"),
        task,
        optax.identity(),
        float,
        whole,
        trained_part(recipe, whole),
        start({}, optax.identity()),
    )
    return "\n".join(_adapters(setup)) + "\n"


@pytest.mark.slow(days=28, group="costly", turn="docs/test_guides")
def test_readme_says_what_its_adapted_run_prints_first(monkeypatch, capsys):
    base = RECIPES["english_book"]()
    calibrated = replace(base, patcher=replace(base.patcher, threshold=2.0))
    monkeypatch.setattr(jaxblt, "load", lambda folder: SimpleNamespace(recipe=calibrated))
    monkeypatch.setattr("jaxblt.training.loop.fit", lambda recipe, folder: print(said_first(recipe), end=""))
    python, said = blocks(ROOT / "README.md", "python")[1], blocks(ROOT / "README.md", "")
    exec(compile(python, "README.md", "exec"), {})
    assert capsys.readouterr().out in said


def test_evo2_md_makes_a_smaller_model(capsys):
    """Its first blocks want weights that are not here; `test_evo2_on_mesh.py` does what they do with a tiny model."""
    reads, loads, adapts, makes = blocks(GUIDES / "evo2.md", "python")
    assert "read_evo2" in reads
    for text in (loads, adapts):
        compile(text, "evo2.md", "exec")
    exec(compile(makes, "evo2.md", "exec"), {})
    assert capsys.readouterr().out == "SMHASMH\n"


@EXAMPLES
def test_adapters_md_says_what_a_run_prints_first():
    """The run of its first example over `books_512`."""
    base = RECIPES["books_512"]()
    python = blocks(GUIDES / "adapters.md", "python")[0]
    names = {"jaxblt": SimpleNamespace(load=lambda folder: SimpleNamespace(recipe=base)), "fit": print}
    names |= {
        name: getattr(jaxblt.adapters, name)
        for name in ("AdapterConfig", "ChunkMean", "Ema", "Prefix", "RouterConfig", "attach")
    }
    names |= {"find_sites": jaxblt.adapters.find_sites, "replace": replace}
    exec(python[python.index("base = ") : python.index("fit(")], names)
    assert said_first(names["recipe"]) in blocks(GUIDES / "adapters.md", "")


def test_tasks_md_scores_stories_of_other_lengths(tmp_path, monkeypatch, capsys):
    write_stories(tmp_path)
    recipe, seen = get("babilong"), []
    task = replace(recipe.data.task, path=str(tmp_path), books=str(tmp_path / "books"), subset="en")
    run = SimpleNamespace(recipe=replace(recipe, data=replace(recipe.data, task=task)))
    monkeypatch.setattr(jaxblt, "load", lambda folder: run)
    monkeypatch.setattr("jaxblt.evaluation.tasks.evaluate.predictor", lambda run: run)
    monkeypatch.setattr(
        "jaxblt.evaluation.tasks.score",
        lambda run, data: seen.append(data) or SimpleNamespace(accuracy=[0.5]),
    )
    (text,) = blocks(GUIDES / "tasks.md", "python")
    exec(compile(text.replace("1024, 65_536, 1_048_576", "512, 2**20"), "tasks.md", "exec"), {})
    assert capsys.readouterr().out == "512 0.5\n1048576 0.5\n"
    short, long = seen
    batch = short.batch(0)
    assert batch.inputs.shape == (128, 514)
    assert np.all((np.asarray(batch.segment_ids) > 0).sum(1) > 480)
    assert long.config.batch_size == 1


def test_tasks_md_compares_with_windows_of_equal_size():
    model = get("babilong").model
    windows = replace(model, stack=replace(model.stack, pattern="window", mlp_dim=1408))
    shapes = [
        jax.eval_shape(one.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        for one in (model, windows)
    ]
    few, many = sorted(count_params(nn.meta.unbox(shape["params"]))[0] for shape in shapes)
    assert many < 1.02 * few


def test_conformance_md_finds_the_fault_of_its_layer(capsys):
    page, names = GUIDES / "conformance.md", {}
    for text in blocks(page, "python"):
        exec(compile(text, "conformance.md", "exec"), names)
    assert capsys.readouterr().out == "".join(blocks(page, "text"))
    known = set(re.findall(r'^- `"(\w+)"', page.read_text(encoding="utf-8"), re.MULTILINE))
    assert known <= set(PROMISES)


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_attention_rules_md_draws_its_picture(capsys):
    guide, names = GUIDES / "attention-rules.md", {}
    for text in blocks(guide, "python"):
        exec(compile(text, guide.name, "exec"), names)
    assert guide.with_suffix(".svg").read_text(encoding="utf-8") == names["picture"]
    assert capsys.readouterr().out.splitlines() == [text.strip() for text in blocks(guide, "text")]
