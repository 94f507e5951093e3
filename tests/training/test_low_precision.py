"""Runs in FP8 that stop and go on, and one that changes to it."""

import jax
import numpy as np
import pytest

from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.precision import Fp8Config
from jaxblt.training.loop import fit
from jaxblt.training.optimisers.adamw import AdamWConfig
from tests.training.tiny import Letters, tiny_recipe

MODEL = ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern=("attention",), mlp_dim=32, scan=False))


def recipe(steps, **options):
    schedule = AdamWConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=8)
    given = {
        "dtype": "bfloat16",
        "precision": "fp8",
        "fp8": Fp8Config(scaling="delayed", history=3),
    } | options
    return tiny_recipe(model=MODEL, optimizer=schedule, steps=steps, eval_every=0, **given)


@pytest.mark.slow(days=28, group="costly")
def test_a_run_in_fp8_goes_on_bit_for_bit_and_one_in_bf16_goes_on_in_fp8(tmp_path, capsys):
    whole = fit(recipe(6), tmp_path / "whole", source=Letters())
    assert "in bfloat16, 7 products in FP8" in capsys.readouterr().out
    fit(recipe(3), tmp_path / "halves", source=Letters())
    halves = fit(recipe(6), tmp_path / "halves", source=Letters(), resume_with=True)
    both = (
        jax.tree.leaves((run.state.params, run.state.scaling, run.state.opt_state)) for run in (whole, halves)
    )
    for a, b in zip(*both, strict=True):
        np.testing.assert_array_equal(a, b)
    seen = jax.tree.leaves(whole.state.scaling)
    assert [leaf.shape for leaf in seen] == [(3, 3)] * 7
    assert all(np.all(leaf[2] > 0) for leaf in seen)

    fit(recipe(3, precision="dtype", fp8=Fp8Config()), tmp_path / "changed", source=Letters())
    changed = fit(recipe(5), tmp_path / "changed", source=Letters(), resume_with=True)
    assert changed.step == 5
    # two steps observed gradients since the change, and the third place is still empty
    assert all(np.all(leaf[2][:2] > 0) and leaf[2][2] == 0 for leaf in jax.tree.leaves(changed.state.scaling))
