"""Whole runs with rows and sequence split over devices, in order and in zigzag."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt.cli.generate import generate
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, HashConfig, StackConfig
from jaxblt.parallel import MeshConfig
from jaxblt.training.loop import fit
from jaxblt.training.objectives.objectives import Masked
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.resolved import read_resolved
from tests.training.test_extension import blt
from tests.training.test_loop import losses
from tests.training.tiny import Letters, patched_recipe, tiny_recipe

ONE = jax.devices()[:1]
SHORT = {"steps": 4, "eval_every": 0, "checkpoint_every": 4}
# With a small eps Adam's first updates are signs, and rounding shows where a gradient is almost zero.
ADAMW = AdamWConfig(learning_rate=1e-2, warmup_steps=2, eps=1e-2)


def run(recipe: Recipe, folder, devices=None) -> list[float]:
    fit(recipe, folder, source=Letters(), devices=devices)
    return list(losses(folder).values())


@pytest.fixture(scope="module")
def entropy_run(tmp_path_factory) -> str:
    """Trained on all devices, each with rows of its own."""
    folder = tmp_path_factory.mktemp("entropy")
    model = ByteLMConfig(stack=blt().encoder, hash=HashConfig(sizes=(3,), table_size=11))
    run(tiny_recipe(model=model, optimizer=ADAMW, **SHORT), folder)
    return str(folder)


@pytest.fixture(scope="module")
def one_run(entropy_run, tmp_path_factory) -> tuple[Recipe, str, list[float]]:
    """A recipe, and its run on one device."""
    model = replace(blt(), hash=HashConfig(sizes=(3, 4), table_size=11))
    recipe = patched_recipe(entropy_run, model=model, optimizer=ADAMW, **SHORT)
    recipe = replace(recipe, data=replace(recipe.data, seq_len=64))
    folder = tmp_path_factory.mktemp("one")
    return recipe, str(folder), run(recipe, folder, ONE)


@pytest.mark.slow(days=28, group="whole runs", turn="a split run")
def test_rows_and_sequence_split_over_eight_devices_give_the_losses_of_one(one_run, tmp_path):
    recipe, folder, one = one_run
    # The toy's entropies lie within 1e-3 nats, so that rounding decides which gap calibration finds.
    recipe = replace(recipe, patcher=read_resolved(folder).recipe.patcher)
    split = run(replace(recipe, mesh=MeshConfig(data=2, fsdp=2, seq=2)), tmp_path / "split")
    assert len(one) == 2
    np.testing.assert_allclose(split, one, rtol=1e-5)


@pytest.mark.slow(days=28, group="whole runs", turn="a split run")
def test_a_run_is_scored_over_split_rows(one_run):
    loaded = jaxblt.load(one_run[1])
    options = {"source": Letters(), "max_batches": 1}
    split = loaded.evaluate("validation", mesh=MeshConfig(data=2, seq=4), **options)
    whole = loaded.evaluate("validation", **options)
    assert split["bytes"] == whole["bytes"] > 0
    assert split["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=1e-5)
    with pytest.raises(ValueError, match="multiply to 3, there are 8 devices"):
        loaded.evaluate("validation", mesh=MeshConfig(data=1, seq=3), **options)


@pytest.mark.slow(days=28, group="whole runs", turn="a split run")
def test_a_run_goes_on_over_a_split_sequence(one_run):
    options = {"prompts": ("ACGT" * 160,), "max_new_bytes": 4, "temperature": 0.0}
    assert generate(one_run[1], mesh="seq=8", **options) == generate(one_run[1], **options)
    with pytest.raises(ValueError, match="multiply to 3, there are 8 devices"):
        generate(one_run[1], mesh="seq=3", **options)
    with pytest.raises(
        ValueError, match=r"'data': 2, .*'seq': 4, .*: a decoder splits the batch or the sequence, not both"
    ):
        generate(one_run[1], mesh="data=2,seq=4", **options)


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize(
    "data", [{"packing": "first_fit", "long_documents": "split"}, {}], ids=["packed", "full"]
)
def test_attention_alone_takes_rows_in_zigzag_order(data, tmp_path):
    """Trained, validated and scored over eight devices."""
    attention = AttentionConfig(dim=16, num_heads=2, layout="zigzag")
    model = ByteLMConfig(
        stack=StackConfig(dim=16, num_layers=2, pattern="A", mlp_dim=16, mixers={"A": attention}), hash=None
    )
    options = SHORT | {"eval_every": 4, "eval_batches": 2}
    recipe = tiny_recipe(model=model, optimizer=ADAMW, data=data, **options)
    recipe = replace(recipe, data=replace(recipe.data, seq_len=64))
    one = fit(recipe, tmp_path / "one", source=Letters(), devices=ONE)
    split = fit(replace(recipe, mesh=MeshConfig(data=2, seq=4)), tmp_path / "split", source=Letters())
    found, expected = (list(losses(tmp_path / name).values()) for name in ("split", "one"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert split.validation["loss"] == pytest.approx(one.validation["loss"], rel=1e-5)
    scored = jaxblt.load(tmp_path / "split").evaluate(
        "validation", source=Letters(), max_batches=2, mesh=MeshConfig(data=2, seq=4)
    )
    assert scored["loss"] == pytest.approx(one.validation["loss"], rel=1e-5)


def test_what_zigzag_order_does_not_go_with_is_named():
    zigzag = AttentionConfig(dim=16, num_heads=2, layout="zigzag")
    with pytest.raises(ValueError, match=r"zigzag layout is for rings.*window=4"):
        replace(zigzag, window=4)
    with pytest.raises(
        ValueError, match=r"layout='zigzag' goes with a pattern of it alone.*got pattern 'AH'"
    ):
        StackConfig(dim=16, pattern="AH", mixers={"A": zigzag})
    alone = StackConfig(dim=16, pattern="X", mixers={"X": zigzag})
    with pytest.raises(ValueError, match=r"n-grams need bytes in order.*hash=None"):
        ByteLMConfig(stack=alone, hash=HashConfig())
    with pytest.raises(ValueError, match="patches are made of bytes in order"):
        replace(blt(), latent=replace(alone, dim=blt().latent.dim))
    with pytest.raises(ValueError, match=r"objective Masked needs bytes in order.*'zigzag'"):
        tiny_recipe(model=ByteLMConfig(stack=replace(alone, causal=False)), objective=Masked(rate=0.3))
    with pytest.raises(ValueError, match="an entropy model needs bytes in order"):
        replace(patched_recipe("some/run"), entropy_model=ByteLMConfig(stack=alone))
