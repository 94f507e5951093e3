"""Thresholds of routers from a sample of the data: motifs, theta and tau before step 0, and theta after the last."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxblt.data.dataset import Dataset
from jaxblt.models.blt import LEVEL, ROUTER
from jaxblt.parallel.rules import replicated
from jaxblt.patching import calibrate_cut
from jaxblt.patching.learned import calibrate_router, seed_motifs
from jaxblt.training.packing import promise_rows
from jaxblt.training.recipe import Recipe, router_of
from jaxblt.training.start.frozen import sample, sample_batches
from jaxblt.training.state import Frozen, whole_params


def with_boundaries(
    recipe: Recipe, params: Any, taken: Any, frozen: Mapping[str, Frozen], data: Dataset, mesh: Mesh
) -> Any:
    """Return the parameters before step 0, with routers that cut at their targets' rates.

    The target of bytes is `recipe.bytes_per_patch`, that of a level its own. A router that another run has trained
    stays as it is.

    Args:
      recipe: with nothing left open.
      params: of the model, as they were drawn.
      taken: those that another run trained.
      frozen: holds the entropy model, if the router reads entropies.
      data: rows to sample.
      mesh: of all devices.
    """
    base = getattr(recipe.model, "base", recipe.model)
    config: Any = router_of(base)
    level: Any = getattr(base, "level", None)
    of_bytes = _draws(config, ROUTER, params, taken)
    of_slots = level is not None and _draws(level.router, LEVEL, params, taken)
    if not (of_bytes or of_slots):
        return params
    given = sample(sample_batches(data, recipe), recipe, mesh, frozen)
    scored = _scorer(recipe, base, given, mesh)
    if of_bytes:
        assert recipe.bytes_per_patch is not None  # the recipe saw to it
        drawn = params[ROUTER]
        own = seed_motifs(config, drawn, np.asarray(given[0]), np.asarray(given[1]))
        scores = scored({**params, ROUTER: own}, "route")[1]
        own = calibrate_router(config, own, scores, here=_inside(given[1]), target=recipe.bytes_per_patch)
        params = {**params, ROUTER: _placed(own, drawn)}
    if of_slots and level is not None:
        scores, here = scored(params, "route_slots")
        drawn, target = params[LEVEL][ROUTER], level.slots_per_group
        own = calibrate_router(level.router, drawn, scores, here=here, target=target)
        params = {**params, LEVEL: {**params[LEVEL], ROUTER: _placed(own, drawn)}}
    return params


def with_target_length(
    recipe: Recipe, params: Any, frozen: Mapping[str, Frozen], data: Dataset, mesh: Mesh
) -> Any:
    """Return trained parameters with theta where the sample's patches have `recipe.bytes_per_patch` bytes.

    The ratio loss leads near that mean: it pulls as hard as the model's own loss where they meet, which is beside it.
    Only theta moves. A plain router has none, and one of a frozen base is not trained: they stay as they are.

    Args:
      recipe: with nothing left open.
      params: of the model, those of a frozen base left out.
      frozen: holds that base, and the entropy model if the router reads entropies.
      data: rows to sample.
      mesh: of all devices.
    """
    base = getattr(recipe.model, "base", recipe.model)
    if not _draws(router_of(base), ROUTER, params, {}):
        return params
    assert recipe.bytes_per_patch is not None  # the recipe saw to it
    assert recipe.patcher is not None
    given = sample(sample_batches(data, recipe), recipe, mesh, frozen)
    p = np.float64(_scorer(recipe, base, given, mesh)(whole_params(params, frozen), "route")[0])
    p = np.clip(p, np.finfo(np.float32).tiny, 1 - np.finfo(np.float32).epsneg)
    score = np.log(p) - np.log1p(-p)
    cut = calibrate_cut(score, recipe.bytes_per_patch, config=recipe.patcher, segment_ids=given[1])
    router = params[ROUTER]
    moved = np.asarray(router["theta"]) + np.exp(np.asarray(router["log_tau"])) * np.float32(cut)
    return {**params, ROUTER: {**router, "theta": jax.device_put(moved, router["theta"].sharding)}}


def _scorer(recipe: Recipe, base: Any, given: Any, mesh: Mesh) -> Callable[[Any, str], Any]:
    """Return what scores a sample by a method of the model, given its parameters."""
    model: Any = promise_rows(base, recipe.data, recipe.patcher)
    model = model.build(dtype=recipe.train.compute_dtype, patcher=recipe.patcher)

    def scored(params: Any, method: str) -> Any:
        def score(params: Any, ids: Any, segments: Any, entropies: Any) -> Any:
            options = {"segment_ids": segments, "entropies": entropies}
            return model.apply({"params": params}, ids, **options, method=method)

        # Hand the sample over: as constants of the program, XLA would compute their embedding while it compiles
        return jax.tree.map(np.asarray, jax.jit(score, out_shardings=replicated(mesh))(params, *given))

    return scored


def _draws(config: Any, name: str, params: Any, taken: Any) -> bool:
    """Return True if the router of a part of the model is trained here, not `taken`, and has a theta."""
    return config is not None and name in params and name not in taken and not config.plain


def _placed(found: Any, drawn: Any) -> Any:
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), found, drawn)


def _inside(segments: jax.Array) -> np.ndarray:
    """Return the bytes of documents but their first."""
    ids = np.asarray(segments)
    before = np.pad(ids[:, :-1], ((0, 0), (1, 0)))
    return (ids > 0) & (ids == before)
