"""SimplePulse: its signature, and runs of it as a language model and as a classifier."""

import inspect
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.cli.evaluate import evaluate
from jaxblt.data import TaskDataConfig
from jaxblt.data.tasks import MQAR, Parity
from jaxblt.inference import Decoder, generate
from jaxblt.models import ByteClassifierConfig, ByteLMConfig, SimplePulse
from jaxblt.models.classifier import pool
from jaxblt.training.loop import fit
from jaxblt.training.objectives.objectives import Classify
from jaxblt.training.start.compile_ahead import abstract_batch, plan_step
from jaxblt.training.stored.resolved import recipe_from_json
from jaxblt.training.stored.serialize import to_json
from tests.training.test_loop import losses
from tests.training.tiny import Letters, tiny_recipe

SMALL: dict[str, Any] = {"vocab_size": 260, "d_model": 16, "num_states": 6, "num_layers": 1}
ONE = jax.devices()[:1]


def test_the_signature_is_the_documented_one() -> None:
    shown = {
        n: p.default for n, p in inspect.signature(SimplePulse).parameters.items() if p.kind != p.KEYWORD_ONLY
    }
    assert shown == {
        "vocab_size": 10_000,
        "d_model": 512,
        "num_states": 128,
        "use_checkpoint": False,
        "sparse_routing": False,
        "top_k_states": None,
    }
    model = SimplePulse(sparse_routing=True, use_checkpoint=True)
    assert isinstance(model, ByteLMConfig)
    engine: Any = model.stack.mixer("state_engine")
    assert (model.vocab_size, model.stack.remat) == (10_000, "full")
    assert (engine.slots, engine.top_k_states, engine.num_heads) == (128, 16, 8)
    assert isinstance(SimplePulse(num_classes=3), ByteClassifierConfig)


@pytest.mark.slow(days=28, group="whole runs")
def test_a_language_model_is_trained_planned_loaded_evaluated_and_generates(tmp_path: Any) -> None:
    model = SimplePulse(**SMALL, use_checkpoint=True, sparse_routing=True, top_k_states=2)
    recipe = tiny_recipe(model=model, steps=8, eval_every=0, mesh={"data": 1})
    assert plan_step(recipe, recipe.mesh.build(ONE)).total > 0
    fit(recipe, tmp_path / "run", source=Letters(), devices=ONE)
    found = losses(tmp_path / "run")
    assert found[8] < found[2]
    run = jaxblt.load(tmp_path / "run")
    assert run.recipe.model == model
    assert run.evaluate("test", source=Letters(), max_batches=1)["bits_per_byte"] > 0
    assert len(generate(run.decoder, run.decoder_params, [b"ACGT"], max_new_bytes=3)[0]) <= 3


@pytest.mark.slow(days=28, group="whole runs")
def test_a_classifier_is_trained_planned_loaded_and_evaluated(tmp_path: Any) -> None:
    data = TaskDataConfig(task=Parity(max_bits=10, eval_size=16), seq_len=12, batch_size=8, labels="symbol")
    recipe = tiny_recipe(steps=8, eval_every=0, mesh={"data": 1})
    recipe = replace(recipe, model=SimplePulse(**SMALL, num_classes=2), data=data, objective=Classify())
    assert recipe_from_json(to_json(recipe)) == recipe
    planned = abstract_batch(recipe, recipe.mesh.build(ONE))
    assert planned.labels is not None
    assert planned.labels.shape == (8,)
    fit(recipe, tmp_path / "run", devices=ONE)
    run = jaxblt.load(tmp_path / "run")
    scores = run.evaluate("test")
    assert 0 <= scores["accuracy"] <= 1
    assert scores["bytes"] == 16
    figures = evaluate(str(tmp_path / "run"))
    assert figures["accuracy"] == pytest.approx(scores["accuracy"])
    assert 0 < figures["majority_accuracy"] < 1
    with pytest.raises(ValueError, match="predicts labels and cannot generate"):
        Decoder(recipe.model)


def test_labels_are_the_answers() -> None:
    from jaxblt.data.pipeline import make_dataset

    data = TaskDataConfig(task=Parity(max_bits=10, eval_size=4), seq_len=12, batch_size=8, labels="symbol")
    batch = make_dataset(data, split="test", mode="eval").batch(0)
    bits = np.where((np.asarray(batch.segment_ids) > 0) & (np.asarray(batch.inputs) == 5), 1, 0)
    np.testing.assert_array_equal(batch.labels[:4], bits[:4].sum(1) % 2)
    for of_empty in (0, -100):  # the last batch is short of rows
        np.testing.assert_array_equal(batch.labels[4:], 0)
        labels = np.where(np.arange(8) < 4, batch.labels, of_empty)
        sums = Classify().sums(jnp.zeros((8, 2)), jax.tree.map(jnp.asarray, replace(batch, labels=labels)))
        np.testing.assert_allclose(sums["loss"], 4 * np.log(2), rtol=1e-6)
    with pytest.raises(
        ValueError, match="labels = 'digit' of 2 classes, and a row answers with id 4: set labels='symbol'"
    ):
        make_dataset(replace(data, labels="digit"), split="test", mode="eval").batch(0)
    several = TaskDataConfig(task=MQAR(symbols=32, pairs=4, positions=32), seq_len=32, labels="symbol")
    with pytest.raises(ValueError, match=r"labels needs rows of one answer, got 4 in a row: set labels=None"):
        make_dataset(several, split="test", mode="eval").batch(0)


@pytest.mark.slow(days=28, group="costly")
def test_pooling_reads_the_bytes_of_a_row_alone() -> None:
    """Padding is of no account."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))
    there = jnp.asarray([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    for pooling, expected in (("mean", x[0, :3].mean(0)), ("last", x[0, 2])):
        found = pool(x, there, pooling)
        np.testing.assert_allclose(found[0], expected, rtol=1e-6)
        np.testing.assert_allclose(found[1], x[1].mean(0) if pooling == "mean" else x[1, 4], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vocab_size": 100}, "vocab_size must be at least 260, got 100"),
        ({"d_model": 0}, "d_model must be at least 1, got 0"),
        ({"num_states": 2.5}, "num_states must be a whole number, got 2.5"),
        ({"use_checkpoint": "yes"}, "use_checkpoint must be True or False, got 'yes'"),
        ({"top_k_states": 4}, "top_k_states=4 needs sparse_routing=True: set it"),
        ({"sparse_routing": True, "top_k_states": 200}, r"top_k_states must lie in 1..128, got 200"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
    ],
)
def test_bad_arguments_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SimplePulse(**options)
