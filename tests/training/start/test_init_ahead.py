"""What draws parameters is one program for any number of slots, so it may be traced before that number is known."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxblt.models import BLTConfig, StackConfig
from jaxblt.models.mixer_table import WORDS
from jaxblt.patching import PatcherConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.start import init_ahead
from jaxblt.training.start.draw_params import _cut
from jaxblt.training.start.init_ahead import InitAhead
from jaxblt.training.start.setup import TracedInit, make_task, trace_init
from tests.training.tiny import TinyConfig, tiny_recipe

OPEN = PatcherConfig(block_size=64)
"""Its threshold and its capacity are still to be found."""


def _recipe(mixer: str = "recurrence", model: Any = None, **options: Any) -> Recipe:
    local = StackConfig(dim=32, num_layers=1, pattern=("recurrence",), mlp_dim=0, scan=False)
    latent = StackConfig(dim=64, num_layers=1, pattern=(mixer,), mlp_dim=0, scan=False)
    blt = BLTConfig(encoder=local, latent=latent, decoder=local, hash=None, bridge_heads=2)
    recipe = tiny_recipe(
        model=blt if model is None else model,
        patcher=OPEN,
        bytes_per_patch=4.0,
        entropy_model=TinyConfig(),
        **options,
    )
    return replace(recipe, data=replace(recipe.data, seq_len=256, batch_size=2))


def _calibrated(recipe: Recipe) -> Recipe:
    return replace(recipe, patcher=replace(OPEN, threshold=1.0, margin=0.01, capacity=32))


def _text(piece: Any) -> str:
    return re.sub(r" at 0x\w+", "", str(piece))


def _makers(traced: TracedInit) -> list[Any]:
    """What makes each parameter: operations, whatever their variables are called, and constants."""
    jaxpr = traced[0].jaxpr
    makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    known = dict(zip(jaxpr.constvars, traced[0].consts, strict=True))
    pieces = [_cut(jaxpr, makers, [var], known) for var in jaxpr.outvars]
    return [(_text(piece), [np.asarray(known[var]).tobytes() for var in piece.invars]) for piece in pieces]


@pytest.mark.parametrize(
    "mixer",
    [
        "hyena",
        *(pytest.param(name, marks=pytest.mark.slow(days=28)) for name in WORDS if name != "hyena"),
    ],
)
def test_no_parameter_depends_on_the_number_of_slots(mixer: str) -> None:
    """For each mixer of a latent stack, whose rows are slots."""
    recipe, ahead = _recipe(mixer), InitAhead()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(init_ahead, "is_ours", lambda recipe: True)  # The entropy model is a test's
        ahead.trace(recipe)
    found = _calibrated(recipe)
    early, late = ahead.of(found), trace_init(make_task(found), found)
    assert early is not None
    assert _makers(early) == _makers(late)
    assert jax.tree.leaves(early[1]) == jax.tree.leaves(late[1])
