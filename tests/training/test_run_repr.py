"""What a notebook shows of a run is a few lines, whatever its parameters."""

from dataclasses import replace

import jax.numpy as jnp

from jaxblt.patching import PatcherConfig
from jaxblt.run import Run
from jaxblt.training.start.setup import make_task
from tests.training.tiny import tiny_recipe


def test_a_run_is_shown_in_a_few_lines():
    patcher = PatcherConfig(mode="space", block_size=16, capacity=8)
    recipe = replace(tiny_recipe(), patcher=patcher)
    params = {f"layer_{i}": jnp.zeros((30, 30)) for i in range(40)}
    shown = repr(Run(recipe, 1200, make_task(recipe), params, {}))
    assert shown.startswith(f"Run {recipe.name!r} at step 1,200 of 24\n")
    assert "TinyConfig, 36,000 parameters" in shown
    assert "patcher    space, 8 slots of 16 bytes" in shown
    assert len(shown) < 2000
