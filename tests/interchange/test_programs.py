"""Programs answer what the run does, in a process without it, for any number of records."""

import json
import zipfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.cli.main import main
from jaxblt.interchange import (
    Program,
    make_embed_program,
    make_score_program,
    read_program,
    write_program,
)
from jaxblt.interchange import programs as programs_module
from jaxblt.patching import PatchOverflowWarning
from jaxblt.precision.weights import SCHEMES
from tests.answers.runs import HEADS, SEQ_LEN, SHORT, markov_run, random_probabilities
from tests.interchange.clean import SIZES
from tests.mixer_table import table


def check_scores(run, nats: np.ndarray) -> None:
    """Nats of every target of the first records are the run's, with 0 behind them."""
    scores = run.score(SHORT[: len(nats)], per_byte=True)
    for i, own in enumerate(scores.per_byte):
        np.testing.assert_allclose(nats[i, : len(own)], own, rtol=1e-5, atol=1e-5)
        assert not nats[i, len(own) :].any()
    np.testing.assert_allclose(nats.sum(1), scores.log_likelihood, rtol=1e-5)


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_programs")
@pytest.mark.parametrize("size", SIZES)
def test_scores_are_the_runs(runs, found, size):
    check_scores(runs["bytes"], found[f"score.bin.{size}.nats"])


@pytest.mark.slow(days=28, group="processes of their own")
def test_scores_of_patches_are_the_runs(runs, tmp_path):
    """Its patches are cut by the program's own entropies."""
    write_program(make_score_program(runs["patches"], SEQ_LEN), tmp_path / "score.bin")
    program = read_program(tmp_path / "score.bin")
    assert "frozen.entropy.embedding.bytes" in program.about["arguments"]
    for size in SIZES:
        check_scores(runs["patches"], program(SHORT[:size])["nats"])


@pytest.mark.slow(days=28, group="processes of their own")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_programs_hold_quantised_weights(runs, tmp_path, scheme):
    run = runs["bytes"].quantize(scheme)
    write_program(make_score_program(run, SEQ_LEN), tmp_path / "score.bin")
    check_scores(run, read_program(tmp_path / "score.bin")(SHORT[:2])["nats"])


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_programs")
@pytest.mark.parametrize("size", SIZES)
def test_embeddings_are_the_runs(runs, found, size):
    expected = np.stack(runs["bytes"].embed(SHORT[:size]).arrays)
    np.testing.assert_allclose(found[f"embed.bin.{size}.states"], expected, rtol=1e-5, atol=1e-5)
    assert [sum(row > 0) for row in found[f"embed.bin.{size}.held"]] == [
        len(record) for record in SHORT[:size]
    ]


@pytest.mark.slow(days=28, group="processes of their own")
@pytest.mark.parametrize(("name", "pool"), [("patches", "per_patch"), ("patches", "mean"), ("bytes", "last")])
def test_embeddings_of_every_pool_are_the_runs(runs, tmp_path, name, pool):
    run, layer = runs[name], 1 if pool == "mean" else None
    write_program(make_embed_program(run, SEQ_LEN, layer=layer, pool=pool), tmp_path / "embed.bin")
    found = read_program(tmp_path / "embed.bin")(SHORT[:3])
    for i, own in enumerate(run.embed(SHORT[:3], layer=layer, pool=pool).arrays):
        states = found["states"][i]
        states = states[found["held"][i] > 0] if pool == "per_patch" else states
        np.testing.assert_allclose(states, own, rtol=1e-5, atol=1e-5)


def test_a_program_says_what_it_is_and_holds_no_kernel(programs):
    program = read_program(programs / "score.bin")
    about = program.about
    assert (about["answer"], about["most_bytes"], about["scores_eos"]) == ("score", SEQ_LEN - 1, True)
    assert about["arguments"] == [*sorted(program.arrays), "bytes", "lengths"]
    assert "model.embedding.bytes" in about["arguments"]
    assert program.exported.platforms == ("cpu", "cuda")
    assert all(": xla on cpu" in line for line in about["ops"])
    assert any(line.startswith("attention") for line in about["ops"])
    custom = {
        line.split("@")[1].split("(")[0]
        for line in program.exported.mlir_module().splitlines()
        if "custom_call @" in line
    }
    assert custom <= {"shape_assertion"}
    with zipfile.ZipFile(programs / "score.bin") as archive:
        assert archive.read("program.stablehlo") == program.exported.mlir_module_serialized
        assert json.loads(archive.read("about.json"))["versions"]["jax"] == jax.__version__


def test_what_a_program_cannot_hold_is_refused_with_its_reason(runs, tmp_path):
    run = runs["bytes"]
    mixers = table(attention=replace(HEADS, implementation="cudnn"))
    model = replace(run.recipe.model, stack=replace(run.recipe.model.stack, mixers=mixers))
    named = replace(run, recipe=replace(run.recipe, model=model))
    with pytest.raises(
        ValueError, match=r"cannot be exported as StableHLO: .*'cudnn' cannot run here.*leave"
    ):
        make_score_program(named, SEQ_LEN)
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        make_score_program(runs["bytes"], 1)
    with pytest.raises(ValueError, match="pool='per_patch' needs a model with patches"):
        make_embed_program(runs["bytes"], SEQ_LEN, pool="per_patch")
    with pytest.raises(ValueError, match=r"platforms are \('tpu',\)"):
        make_score_program(runs["bytes"], SEQ_LEN, platforms=("tpu",))
    (tmp_path / "a.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match="is no program that can be read"):
        read_program(tmp_path / "a.bin")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_program(tmp_path / "none.bin")


def test_records_that_a_row_cannot_hold_are_refused(programs):
    program = read_program(programs / "score.bin")
    for records, says in (
        ([], "no records were given"),
        ([b"a", b""], "record 1 is 0 bytes, expected 1 to 63 bytes"),
        ([bytes(64)], "record 0 is 64 bytes, expected 1 to 63 bytes"),
        (["text"], "record 0 is a str"),
    ):
        with pytest.raises(ValueError, match=says):
            program(records)


def test_answers_that_are_wrong_are_told():
    """By a program that answers what it is told to."""
    nats, refused, wanted = jnp.zeros((2, SEQ_LEN)), jnp.array([0, 3]), jnp.array([4, 5])
    patches = {"capacity": 4, "block_size": 16}

    def answering(**answers):
        fake = SimpleNamespace(call=lambda arrays, rows, sizes: answers)
        return Program({"most_bytes": 8, "patches": patches}, cast(Any, fake), {})

    with pytest.warns(PatchOverflowWarning, match="3 of 9 patch boundaries"):
        answering(nats=nats, refused=refused, wanted=wanted)([b"a", b"b"])
    with pytest.raises(ValueError, match="the answer for record 1 is not finite"):
        answering(nats=nats.at[1, 0].set(jnp.nan))([b"a", b"b"])


def test_entropies_that_are_not_finite_are_told(runs, monkeypatch):
    """They cut no patch, so the states are finite: `row_states` says so apart."""
    found = jnp.ones((1, 16)), jnp.ones((1, SEQ_LEN), jnp.int32), jnp.zeros(1, bool)
    monkeypatch.setattr(programs_module, "row_states", lambda *args, **options: found)
    made = make_embed_program(runs["bytes"], SEQ_LEN, platforms=("cpu",))
    with pytest.raises(ValueError, match="the answer for record 0 is not finite"):
        Program(made.about, made.exported, made.arrays)(SHORT[:1])


def test_options_that_do_not_go_together_are_named(files, tmp_path):
    run, out = str(files / "bytes"), str(tmp_path / "other.bin")
    for argv, says in (
        (["--stablehlo", "score"], "--stablehlo needs --length, the positions of a row"),
        (["--length", "32"], "--length belongs to --stablehlo"),
        (["--stablehlo", "score", "--length", "32", "--pool", "last"], "--pool belongs to --stablehlo embed"),
        (["--stablehlo", "score", "--length", "32", "--dtype", "bfloat16"], "--dtype belongs to safetensors"),
    ):
        with pytest.raises(ValueError, match=says):
            main(["export", run, "--out", out, *argv])
    assert not list(tmp_path.iterdir())


def test_a_program_reads_records_in_the_runs_letters():
    data = {"kind": "fasta", "paths": ("g.fa",), "soft_mask": "upper", "scored": "ACGT", "eos": False}
    run = markov_run(random_probabilities(), **data)
    made, records = make_score_program(run, 16, platforms=("cpu",)), [b"NNgattaca", b"GATTACA", b"NNN"]
    rows = np.zeros((3, 16), np.uint8)
    for row, record in zip(rows, records, strict=True):
        row[: len(record)] = np.frombuffer(record, np.uint8)
    sizes = jnp.asarray([len(record) for record in records], jnp.int32)
    found = made.exported.call(made.arrays, jnp.asarray(rows), sizes)
    scores = run.score(records)
    np.testing.assert_array_equal(found["scored"], scores.scored)
    np.testing.assert_allclose(found["nats"].sum(1), scores.log_likelihood, rtol=1e-5)
    assert made.about["scored"] == "ACGT"
    assert made.about["upper"] is True
