"""The router of learned boundaries before step 0: motifs, theta and tau, found on a sample of the data."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxblt.data.dataset import Dataset
from jaxblt.models.blt import ROUTER
from jaxblt.parallel.rules import replicated
from jaxblt.patching.learned import calibrate_router, seed_motifs
from jaxblt.training.packing import promise_rows
from jaxblt.training.recipe import Recipe, router_of
from jaxblt.training.start.frozen import sample, sample_batches
from jaxblt.training.state import Frozen


def with_boundaries(
    recipe: Recipe, params: Any, taken: Any, frozen: Mapping[str, Frozen], data: Dataset, mesh: Mesh
) -> Any:
    """Return the parameters before step 0, with a router that cuts at the rate of `recipe.bytes_per_patch`.

    A router that another run has trained stays as it is.

    Args:
      recipe: with nothing left open.
      params: of the model, as they were drawn.
      taken: those that another run trained.
      frozen: holds the entropy model, if the router reads entropies.
      data: rows to sample.
      mesh: of all devices.
    """
    config, drawn = router_of(recipe.model), params.get(ROUTER)
    if config is None or drawn is None or ROUTER in taken or config.plain:
        return params
    assert recipe.bytes_per_patch is not None  # the recipe saw to it
    model: Any = promise_rows(getattr(recipe.model, "base", recipe.model), recipe.data, recipe.patcher)
    model = model.build(dtype=recipe.train.compute_dtype, patcher=recipe.patcher)
    ids, segments, entropies = sample(sample_batches(data, recipe), recipe, mesh, frozen)
    own = seed_motifs(config, drawn, np.asarray(ids), np.asarray(segments))
    params = {**params, ROUTER: own}

    def score(params: Any, ids: Any, segments: Any, entropies: Any) -> jax.Array:
        options = {"segment_ids": segments, "entropies": entropies}
        return model.apply({"params": params}, ids, **options, method="route")[1]

    # Hand the sample over: as constants of the program, XLA would compute their embedding while it compiles
    scored = jax.jit(score, out_shardings=replicated(mesh))(params, ids, segments, entropies)
    scores = np.asarray(scored)
    found = calibrate_router(config, own, scores, here=_inside(segments), target=recipe.bytes_per_patch)
    placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), found, drawn)
    return {**params, ROUTER: placed}


def _inside(segments: jax.Array) -> np.ndarray:
    """Return the bytes of documents but their first."""
    ids = np.asarray(segments)
    before = np.pad(ids[:, :-1], ((0, 0), (1, 0)))
    return (ids > 0) & (ids == before)
