"""The router of learned boundaries before step 0: motifs, theta and tau, found on a sample of the data."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxblt.data.dataset import Dataset
from jaxblt.models.blt import LEVEL, ROUTER
from jaxblt.parallel.rules import replicated
from jaxblt.patching.learned import calibrate_router, seed_motifs
from jaxblt.training.packing import promise_rows
from jaxblt.training.recipe import Recipe, router_of
from jaxblt.training.start.frozen import sample, sample_batches
from jaxblt.training.state import Frozen


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
    model: Any = promise_rows(base, recipe.data, recipe.patcher)
    model = model.build(dtype=recipe.train.compute_dtype, patcher=recipe.patcher)
    given = sample(sample_batches(data, recipe), recipe, mesh, frozen)

    def scored(params: Any, method: str) -> Any:
        def score(params: Any, ids: Any, segments: Any, entropies: Any) -> Any:
            options = {"segment_ids": segments, "entropies": entropies}
            return model.apply({"params": params}, ids, **options, method=method)

        # Hand the sample over: as constants of the program, XLA would compute their embedding while it compiles
        return jax.tree.map(np.asarray, jax.jit(score, out_shardings=replicated(mesh))(params, *given))

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


def _draws(config: Any, name: str, params: Any, taken: Any) -> bool:
    """Return whether the router of a part of the model was drawn, and has a theta to calibrate."""
    return config is not None and name in params and name not in taken and not config.plain


def _placed(found: Any, drawn: Any) -> Any:
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), found, drawn)


def _inside(segments: jax.Array) -> np.ndarray:
    """Return the bytes of documents but their first."""
    ids = np.asarray(segments)
    before = np.pad(ids[:, :-1], ((0, 0), (1, 0)))
    return (ids > 0) & (ids == before)
