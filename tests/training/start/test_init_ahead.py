"""What draws parameters is one program for any number of slots, so it may be traced before that number is known."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, RouterConfig, attach
from jaxblt.models import BLTConfig, StackConfig
from jaxblt.models.mixer_table import WORDS
from jaxblt.patching import PatcherConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.start import begin, init_ahead, setup
from jaxblt.training.start.draw_params import _cut
from jaxblt.training.start.init_ahead import InitAhead
from jaxblt.training.start.setup import TracedInit, make_task, open_data, trace_init
from jaxblt.training.stored.checkpoint import Checkpointer
from tests.training.tiny import Letters, TinyConfig, tiny_recipe

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


class _Drawn(Exception):
    """Parameters would be drawn now."""


def test_a_start_traces_it_once_and_ahead_only_if_it_calibrates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start reads what the first one calibrated, and has nothing to trace beside."""
    recipe = replace(_recipe(), entropy_model=None, patcher=PatcherConfig(mode="space", block_size=64))
    recipe = replace(recipe, train=replace(recipe.train, compilation_cache=str(tmp_path / "cache")))
    mesh, made = recipe.mesh.build(jax.devices()[:1]), []

    def note(name: str) -> Any:
        def trace(*args: Any) -> TracedInit:
            made.append(name)
            return trace_init(*args)

        return trace

    def draw(setup: Any, frozen: Any) -> None:
        raise _Drawn

    monkeypatch.setattr(init_ahead, "trace_init", note("ahead"))
    monkeypatch.setattr(setup, "trace_init", note("set-up"))
    monkeypatch.setattr(begin, "init_state", draw)
    for expected in (["ahead"], ["ahead", "set-up"]):
        with jax.set_mesh(mesh), Checkpointer(tmp_path / "checkpoints") as checkpoints:
            data = open_data(recipe, mesh, source=Letters())
            with pytest.raises(_Drawn):
                begin.begin(recipe, tmp_path, data, mesh, checkpoints)
        assert made == expected


def test_what_may_depend_on_slots_is_not_traced_ahead() -> None:
    """Routers count the steps before their first code; a model from elsewhere promises nothing; FP8 looks for sites."""
    plain = replace(_recipe(), entropy_model=None, patcher=PatcherConfig(mode="space", block_size=64))
    adapter = AdapterConfig(sites=("mlp/*",), rank=2, router=RouterConfig(chunk=8, reads=(ChunkMean(),)))
    local = StackConfig(dim=32, num_layers=1, pattern=("recurrence",), mlp_dim=32, scan=False)
    blt = BLTConfig(encoder=local, latent=local, decoder=local, hash=None, bridge_heads=2)
    for other in (
        replace(plain, model=attach(blt, adapter, "latent")),
        replace(plain, entropy_model=TinyConfig()),
        replace(plain, train=replace(plain.train, dtype="bfloat16", precision="fp8")),
    ):
        ahead = InitAhead()
        ahead.trace(other)
        assert ahead.of(other) is None
    ahead = InitAhead()
    ahead.trace(plain)
    assert ahead.of(replace(plain, patcher=replace(plain.patcher, capacity=32))) is not None
    assert ahead.of(replace(plain, train=replace(plain.train, seed=5))) is None
