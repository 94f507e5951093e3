"""What a calibration runs compiles in threads, side by side and beside the thread that waits for it."""

import threading
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxblt.patching import (
    PatcherConfig,
    calibrate_threshold,
    make_patches,
    patches_per_block,
    threshold_margin,
)
from jaxblt.patching.calibration_programs import block_counts
from jaxblt.training.start import frozen
from jaxblt.training.start.calibration_sample import Sample, compile_side_by_side, sample_batches
from jaxblt.training.start.setup import open_data
from jaxblt.training.state import Frozen, freeze_entropy
from tests.training.tiny import Letters, TinyConfig, tiny_recipe

PATIENCE_S = 120
"""Seconds after which threads that wait for each other give up, as they would if programs came one after another."""
MODEL = TinyConfig(dim=8)


@pytest.fixture(scope="module")
def entropy_model() -> dict[str, Frozen]:
    ids = jnp.zeros((1, 32), jnp.int32)
    drawn = nn.meta.unbox(jax.jit(MODEL.build().init)(jax.random.key(0), ids))["params"]
    return freeze_entropy(jax.tree.map(lambda x: 2 * x, drawn))


@pytest.mark.parametrize("mode", ["entropy", pytest.param("greedy", marks=pytest.mark.slow(days=28))])
def test_a_calibration_waits_for_no_program_of_its_own(
    mode: Any,
    entropy_model: dict[str, Frozen],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JAX logs the compilations of this thread alone: none. Two programs and the meanwhile are there at once."""
    recipe = tiny_recipe(
        patcher=PatcherConfig(mode=mode, block_size=16), bytes_per_patch=3.0, entropy_model=MODEL
    )
    mesh = recipe.mesh.build(jax.devices()[:1])
    there, compile_one = threading.Barrier(3), jax.stages.Lowered.compile
    begun: list[Any] = []

    def compile(program: Any) -> Any:
        begun.append(program)
        if len(begun) <= 2:
            there.wait(PATIENCE_S)
        return compile_one(program)

    def meanwhile(recipe: Any) -> None:
        assert recipe.patcher.threshold is None
        there.wait(PATIENCE_S)

    with jax.set_mesh(mesh):
        data = open_data(recipe, mesh, source=Letters())
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
        with jax.log_compiles():
            found = frozen.calibrate(recipe, data, mesh, entropy_model, meanwhile)
    assert found.capacity is not None
    assert len(begun) == (6 if mode == "entropy" else 5)
    assert not [text for text in caplog.messages if "Finished XLA compilation" in text]


def test_programs_of_one_shape_serve_any_threshold(entropy_model: dict[str, Frozen]) -> None:
    """What they say is what the public functions say of the rule with its threshold."""
    recipe = tiny_recipe(patcher=PatcherConfig(block_size=16), bytes_per_patch=3.0, entropy_model=MODEL)
    mesh = recipe.mesh.build(jax.devices()[:1])
    batches = sample_batches(open_data(recipe, mesh, source=Letters()), recipe)
    ids, segments, entropies = Sample(batches, recipe, mesh, entropy_model).read()
    for length in (2.0, 4.0):
        threshold = calibrate_threshold(entropies, length, config=recipe.patcher, segment_ids=segments)
        rule = replace(recipe.patcher, threshold=threshold)
        assert threshold_margin(entropies, config=rule, segment_ids=segments) > 0
        cut = make_patches(rule, ids, segment_ids=segments, entropies=entropies)
        assert (block_counts(rule, ids, segments, entropies) == patches_per_block(cut)).all()


def test_what_fails_in_a_thread_is_raised() -> None:
    class Failing:
        def compile(self) -> None:
            raise RuntimeError("out of registers")

    programs: Any = [Failing()]
    with pytest.raises(RuntimeError, match="out of registers"):
        compile_side_by_side(programs, lambda: None)
