"""A frozen base and what is trained over it: adapters, routers, and the parameters that a recipe names besides.

The base is another run's model. It lies in `TrainState.frozen["base"]`: kernels of products and tables in the compute
dtype, to which the model rounds them anyway; vectors, filters, poles, and matrices that are read in fp32, in fp32.
`TrainState.params` is the trained part, and so are gradients and optimiser slots.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.adapters import (
    Neighbours,
    detach,
    join_params,
    load_index,
    retrievals,
    split_params,
    without_index,
)
from jaxblt.adapters.code.router import ROUTER
from jaxblt.adapters.retrieval.neighbours import INDEX
from jaxblt.adapters.update.attach import stacks_of
from jaxblt.models.products import products_in
from jaxblt.models.stack import stack_periods, unstack_periods
from jaxblt.parallel.rules import replicated, state_shardings
from jaxblt.training.optimisers.adamw import TABLES, axis_names, is_boxed
from jaxblt.training.optimisers.patterns import without
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import BASE, Frozen, content_hash, freeze, widen
from jaxblt.training.stored.checkpoint import restore
from jaxblt.training.stored.remote_run import readable
from jaxblt.training.stored.resolved import checkpoint_dir, read_resolved
from jaxblt.training.stored.serialize import differences


def trained_part(recipe: Recipe, params: Any) -> Any:
    """Return what a recipe trains of the model's parameters (arrays, shapes or boxes): all but what is frozen.

    Raises:
      ValueError: nothing is left to train, or a pattern of `freeze` or `also_train` names no parameter.
    """
    if recipe.base_run is None:
        return without(params, recipe.freeze)
    _, trained = split_params(params, recipe.also_train)
    if not trained:
        raise ValueError(
            f"base_run={recipe.base_run!r} freezes the model, and nothing is left to train: attach adapters "
            "(jaxblt.adapters.update.attach) or name parameters in also_train"
        )
    return trained


def at_start(recipe: Recipe, trained: Any, frozen: Mapping[str, Frozen]) -> Any:
    """Return the trained part before step 0, as drawn, except that what it shares with the base begins as there."""
    if recipe.base_run is None or BASE not in frozen:
        return trained
    return _shared(trained, widen(frozen[BASE].params))


def _shared(trained: Any, base: Any) -> Any:
    if not isinstance(trained, dict):
        return base
    return {name: _shared(below, base[name]) if name in base else below for name, below in trained.items()}


def load_base(recipe: Recipe, boxed: Callable[[], Any], mesh: Mesh) -> dict[str, Frozen]:
    """Load the base of a recipe by its name among the frozen trees; empty for a recipe without one.

    Its stacks may be scanned where the recipe's are unrolled, which ranks by depth need.

    Args:
      recipe: names the run.
      boxed: traces the model that the recipe builds; gives the shapes of its parameters with their axes' names.
      mesh: of all devices, among which the base is divided as the model's parameters are.

    Raises:
      FileNotFoundError: `base_run` holds no run or no checkpoint.
      ValueError: it is of another model, or has a base of its own; or an index is missing, damaged, of another base,
        stack or chunk, or too large.
    """
    if recipe.base_run is None:
        _check_no_index(recipe)
        return {}
    scanned = _check_model(recipe)
    dtype = recipe.train.compute_dtype
    products, whole = products_in(dtype, boxed)
    base = without_index(split_params(whole)[0])
    shapes = nn.meta.unbox(base)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        state_shardings(shapes, base, mesh),
    )
    placed |= {name: stack_periods(placed[name], join=_stacked) for name in scanned}
    with readable(recipe.base_run, "newest") as folder:
        params = restore(checkpoint_dir(folder), placed, subtree="params").state
    indexes = _indexes(recipe, params, mesh)
    params |= {name: unstack_periods(params[name]) for name in scanned}
    return {BASE: freeze(join_params(rounded(params, base, dtype, products), indexes))}


def _stacked(*layers: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of parameters of a scan, of which each layer lies as it would alone."""
    (first, *_), sharding = layers, layers[0].sharding
    assert isinstance(sharding, NamedSharding)
    spread = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((len(layers), *first.shape), first.dtype, sharding=spread)


def _check_no_index(recipe: Recipe) -> None:
    """Check that a router without a base searches no index: an index is of a base, and would be trained."""
    if found := retrievals(recipe.model):
        raise ValueError(
            f"the routers of stacks {sorted(found)} search an index of a frozen base, and base_run is None: set "
            "base_run to the run that the index was made of"
        )


def _indexes(recipe: Recipe, params: Any, mesh: Mesh) -> dict[str, Any]:
    """Return the indexes of a recipe's routers, as part of the base that they were made of."""
    found = retrievals(recipe.model)
    if found and recipe.also_train:
        raise ValueError(
            f"also_train={recipe.also_train} changes the base that a router's queries are made by, and stacks "
            f"{sorted(found)} search an index of it: leave also_train out"
        )
    trees, base = {}, content_hash(params) if found else ""
    for name, stack in found.items():
        router = stack.adapter.router
        (read,) = router.reads_of(Neighbours)
        index = load_index(read.index)
        index.check(read, chunk=router.chunk, base=base, stack=name, dim=stack.dim)
        arrays = index.params(read.capacity)
        trees[name] = {ROUTER: {INDEX: jax.device_put(arrays, replicated(mesh))}}
    return trees


def base_shapes(recipe: Recipe, boxed: Callable[[], Any]) -> dict[str, Frozen]:
    """Return what `load_base` would, as shapes and without a content hash: `base_run` need not hold a run yet."""
    if recipe.base_run is None:
        return {}
    dtype = recipe.train.compute_dtype
    products, whole = products_in(dtype, boxed)
    base, _ = split_params(whole)
    shapes = jax.eval_shape(lambda params: rounded(params, base, dtype, products), nn.meta.unbox(base))
    return {BASE: Frozen(shapes, "planned")}


def _check_model(recipe: Recipe) -> list[str]:
    """Return the stacks that the base scans and the recipe unrolls; raise ValueError for a base of another model."""
    assert recipe.base_run is not None
    trained = read_resolved(recipe.base_run).recipe
    if trained.base_run is not None:
        raise ValueError(
            f"base_run={recipe.base_run!r} holds adapters over a base of its own, {trained.base_run!r}: name that run"
        )
    model, there = detach(recipe.model), stacks_of(trained.model)
    unrolled = {name: stack for name, stack in stacks_of(model).items() if not stack.scan}
    scanned = [name for name in unrolled if name in there and there[name].scan]
    alike: Any = {name: dataclasses.replace(unrolled[name], scan=True) for name in scanned}
    changed = differences(trained.model, dataclasses.replace(model, **alike), "model")
    if changed:
        raise ValueError(
            f"base_run={recipe.base_run!r} is of another model than the recipe's without its adapters: "
            f"{', '.join(changed)}; attach adapters to the config of that run"
        )
    return scanned


def rounded(params: Any, boxed: Any, dtype: Any, products: Collection[str]) -> Any:
    """Round parameters to `dtype` where the model rounds them so anyway: kernels of products, and tables.

    Args:
      params: fp32.
      boxed: the same with their logical axis names.
      dtype: that products are computed in.
      products: paths of the `Linear`s that compute in it.
    """

    def cast(path: tuple[Any, ...], box: Any, x: Any) -> Any:
        *above, own = (str(entry.key) for entry in path)
        is_product = own == "kernel" and "/".join(above) in products
        is_table = axis_names(box)[0] in TABLES
        return x.astype(dtype) if is_product or is_table else x

    return jax.tree_util.tree_map_with_path(cast, boxed, params, is_leaf=is_boxed)


def whole(params: Any, frozen: Mapping[str, Frozen]) -> Any:
    """Lay the trained parameters over those of the base, if there is one, in fp32."""
    return join_params(widen(frozen[BASE].params), params) if BASE in frozen else params
