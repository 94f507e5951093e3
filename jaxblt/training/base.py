"""A frozen base and what is trained over it: adapters, routers, and the parameters that a recipe names besides.

The base is another run's model. It lies in `TrainState.frozen["base"]`: matrices in the compute dtype, for that is what
products read; vectors, filters and poles in fp32. `TrainState.params` is the trained part, and so are gradients and
optimiser slots.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxblt.adapters import detach, join_params, split_params
from jaxblt.parallel.rules import state_shardings
from jaxblt.training.checkpoint import restore
from jaxblt.training.optimizer import FILTERS, STACKED, axis_names, is_boxed
from jaxblt.training.recipe import Recipe, differences
from jaxblt.training.resolved import checkpoint_dir, read_resolved
from jaxblt.training.state import BASE, Frozen, freeze, widen


def trained_part(recipe: Recipe, params: Any) -> Any:
    """What a recipe trains of the model's parameters (arrays, shapes or boxes): all of them without a base.

    Raises:
      ValueError: there is a base and nothing to train over it, or `also_train` names no parameter.
    """
    if recipe.base_run is None:
        return params
    _, trained = split_params(params, recipe.also_train)
    if not trained:
        raise ValueError(
            f"base_run={recipe.base_run!r} freezes the model, and nothing is left to train: attach adapters "
            "(jaxblt.adapters.attach) or name parameters in also_train"
        )
    return trained


def at_start(recipe: Recipe, params: Any, frozen: Mapping[str, Frozen]) -> Any:
    """The trained part before step 0: what it shares with the base begins as the base has it."""
    trained = trained_part(recipe, params)
    if recipe.base_run is None or BASE not in frozen:
        return trained
    return _shared(trained, widen(frozen[BASE].params))


def _shared(trained: Any, base: Any) -> Any:
    if not isinstance(trained, dict):
        return base
    return {name: _shared(below, base[name]) if name in base else below for name, below in trained.items()}


def load_base(recipe: Recipe, boxed: Any, mesh: Mesh) -> dict[str, Frozen]:
    """The base of a recipe by its name among the frozen trees; empty for a recipe without one.

    Args:
      recipe: names the run.
      boxed: shapes of the model's parameters with their logical axis names, as the recipe builds it.
      mesh: of all devices, among which the base is divided as the model's parameters are.

    Raises:
      FileNotFoundError: `base_run` holds no run or no checkpoint.
      ValueError: it is of another model, or has a base of its own.
    """
    if recipe.base_run is None:
        return {}
    _check_model(recipe)
    base, _ = split_params(boxed)
    shapes = nn.meta.unbox(base)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        state_shardings(shapes, base, mesh),
    )
    params = restore(checkpoint_dir(recipe.base_run), placed, subtree="params").state
    return {BASE: freeze(rounded(params, base, recipe.train.compute_dtype))}


def _check_model(recipe: Recipe) -> None:
    assert recipe.base_run is not None
    trained = read_resolved(recipe.base_run).recipe
    if trained.base_run is not None:
        raise ValueError(
            f"base_run={recipe.base_run!r} holds adapters over a base of its own, {trained.base_run!r}: name that run"
        )
    changed = differences(trained.model, detach(recipe.model), "model")
    if changed:
        raise ValueError(
            f"base_run={recipe.base_run!r} is of another model than the recipe's without its adapters: "
            f"{', '.join(changed)}; attach adapters to the config of that run"
        )


def rounded(params: Any, boxed: Any, dtype: Any) -> Any:
    """Parameters whose matrices are in `dtype`: not vectors, nor what has an axis of poles or taps.

    Args:
      params: fp32.
      boxed: the same with their logical axis names.
      dtype: that products are computed in.
    """

    def cast(box: Any, x: Any) -> Any:
        names = [name for name in axis_names(box) if name != STACKED]
        is_matrix = len(names) > 1 and not any(name in FILTERS for name in names)
        return x.astype(dtype) if is_matrix and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, boxed, params, is_leaf=is_boxed)


def whole(params: Any, frozen: dict[str, Frozen]) -> tuple[Any, dict[str, Frozen]]:
    """The model's parameters in fp32 with the base merged in, and the other frozen trees."""
    if BASE not in frozen:
        return params, frozen
    others = {name: tree for name, tree in frozen.items() if name != BASE}
    return join_params(widen(frozen[BASE].params), params), others
