"""Bits per byte against context: the same bytes at every length, each after its own context and no more."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from experiments.benchmark.__main__ import main
from experiments.benchmark.trained_runs import context as script
from jaxblt.data import make_dataset, vocab
from jaxblt.training.loop import fit
from tests.training.tiny import Letters, tiny_recipe

CONTEXTS = (8, 16, 32)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    fit(tiny_recipe(steps=6, eval_every=0), run_dir, source=Letters())
    return jaxblt.load(run_dir)


def rows_of(loaded, context):
    whole = make_dataset(loaded.recipe.data, split="test", mode="eval", source=Letters())
    return script.context_rows(whole, context, longest=32, targets=6)


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/trained_runs/test_context")
def test_every_context_ends_with_the_same_targets(loaded):
    parts = [[rows_of(loaded, c).batch(row) for row in range(12)] for c in CONTEXTS]
    for short, middle, long in zip(*parts, strict=True):
        for batch, length in zip((short, middle, long), CONTEXTS, strict=True):
            assert batch.inputs.shape == (1, length)
            np.testing.assert_array_equal(batch.inputs, long.inputs[:, -length:])
            np.testing.assert_array_equal(batch.targets, long.targets[:, -length:])
            np.testing.assert_array_equal(batch.loss_mask[0], np.arange(length) >= length - 6)
            assert batch.segment_ids.min() == 1
    assert rows_of(loaded, 8).num_rows == rows_of(loaded, 32).num_rows == 12


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures_are_those_of_the_model_on_each_context(loaded):
    found = script.figures_of(*script.document_nats(loaded, (32, 8, 16), targets=6, source=Letters()))
    nats = {}
    for context in CONTEXTS:
        rows = rows_of(loaded, context)
        batches = [rows.batch(row) for row in range(rows.num_rows)]
        inputs, targets = (
            np.concatenate([getattr(b, name) for b in batches]) for name in ("inputs", "targets")
        )
        log_p = np.asarray(
            jax.nn.log_softmax(loaded.model.apply({"params": loaded.params}, inputs)[0]), np.float64
        )
        nats[context] = -np.take_along_axis(log_p, targets[..., None], -1)[:, -6:].sum()
    assert [entry["context"] for entry in found] == list(CONTEXTS)
    for entry in found:
        bits = nats[entry["context"]] / math.log(2) / (12 * 6)
        np.testing.assert_allclose(entry["bits_per_byte"]["value"], bits, rtol=1e-5)
        gain = (nats[8] - nats[entry["context"]]) / math.log(2) / (12 * 6)
        np.testing.assert_allclose(entry["gain"]["value"], gain, atol=1e-5)
        assert entry["bits_per_byte"]["num_bytes"] == 12 * 6
        np.testing.assert_allclose(
            entry["perplexity"]["value"], math.exp(nats[entry["context"]] / (12 * 6)), rtol=1e-5
        )


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_uniform_model_is_as_perplexed_as_there_are_ids(loaded):
    state = replace(loaded.state, params=jax.tree.map(jnp.zeros_like, loaded.params))
    run = SimpleNamespace(recipe=loaded.recipe, task=loaded.task, state=state)
    for entry in script.figures_of(*script.document_nats(run, (8, 16), targets=6, source=Letters())):
        np.testing.assert_allclose(entry["perplexity"]["value"], vocab.VOCAB_SIZE, rtol=1e-5)


def test_fewer_rows_are_spread_over_the_split():
    assert script.spread(12, None) == list(range(12))
    assert script.spread(13, 4) == [0, 4, 8, 12]
    assert script.spread(5, 1) == [0]
    assert script.spread(3, 9) == [0, 1, 2]


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize(
    ("contexts", "targets", "says"),
    [
        ((8, 16), 9, "1..the shortest context of [8, 16], got 9"),
        ((8, 512), 6, "no document has the 512 bytes of the longest context (the longest has 411)"),
    ],
)
def test_lengths_that_do_not_fit_are_named(loaded, contexts, targets, says):
    with pytest.raises(ValueError) as caught:
        script.document_nats(loaded, contexts, targets=targets, source=Letters())
    assert says in str(caught.value)


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/trained_runs/test_context")
def test_the_script_writes_figures_and_where_they_come_from(loaded, tmp_path, monkeypatch):
    sample = replace(loaded.recipe.data, sample="udhr")
    monkeypatch.setattr(jaxblt, "load", lambda _: replace(loaded, recipe=replace(loaded.recipe, data=sample)))
    options = [
        "--contexts",
        "8",
        "16",
        "--targets",
        "4",
        "--max-rows",
        "3",
        "--out",
        str(tmp_path / "c.json"),
    ]
    main(["context", "runs/none", *options])
    found = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert [entry["context"] for entry in found["contexts"]] == [8, 16]
    assert found["contexts"][0]["bits_per_byte"]["num_bytes"] == 12
    assert (found["run"], found["step"], found["split"]) == ("tiny", 6, "test")
    assert found["versions"]["jax"] == jax.__version__
