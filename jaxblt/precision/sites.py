"""Which products and attention of a model run in FP8, and the largest entries that they remember."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from jaxblt.einsums import multiply, read_equation
from jaxblt.layers import FP8, Linear
from jaxblt.parallel.attention.plan import Plan
from jaxblt.precision.attention import AttentionPast, attend_in_fp8, why_not
from jaxblt.precision.config import Fp8Config
from jaxblt.precision.products import ROLES, Past, fp8_product, round_once

MULTIPLE = 16
"""Of which both sides of a product are multiples: cuBLAS takes no others in FP8."""
_AMAX, _ATTEND = "amax", "attend"


def runs_in_fp8(layer: Linear, x: Any, config: Fp8Config) -> bool:
    """Return whether a `Linear` runs in FP8: in bfloat16 throughout, of sides that divide by 16, and not kept out.

    One with a product of its own keeps that.
    """
    own = layer.accumulate is not None or layer.product is not multiply
    if jnp.dtype(layer.dtype) != jnp.bfloat16 or own:
        return False
    letters = read_equation(layer.equation)
    if set(letters.new) & set(letters.given):
        return False
    shape, inner = layer.kernel_shape(x), len(letters.summed)
    if prod(shape[:inner]) % MULTIPLE or prod(shape[inner:]) % MULTIPLE:
        return False
    return not any(fnmatchcase("/".join(layer.path), pattern) for pattern in config.keep)


def in_fp8(config: Fp8Config | None) -> AbstractContextManager[None]:
    """Run products of `Linear`s, and attention if the config says so, in FP8 inside the block; None changes nothing.

    With "delayed" scaling the modules are applied with the collection `FP8`, as `first_amax` makes it. Its gradient is
    what `next_amax` takes.
    """

    def intercept(call: Any, args: Any, options: Any, context: Any) -> Any:
        if config is not None and _multiplies(context):
            return _products(config, *args)
        if config is not None and _attends(context, config, args):
            return _attention(config, context.module, *args)
        return call(*args, **options)

    return nn.intercept_methods(intercept)


def _multiplies(context: Any) -> bool:
    return isinstance(context.module, Linear) and context.method_name == "products"


def _attends(context: Any, config: Fp8Config, args: Any) -> bool:
    """Return whether a method attends to whole causal rows, which `config` wants in FP8."""
    named = config.attention and context.method_name == _ATTEND and bool(args) and isinstance(args[0], Plan)
    return named and args[0].causal and args[0].window is None and args[0].rule is None


def _attention(config: Fp8Config, module: nn.Module, plan: Plan, q: Any, k: Any, v: Any, given: Any) -> Array:
    _check_attends(module, plan, q, k, given)
    entries: Any = module.get_variable(FP8, _AMAX)
    return attend_in_fp8(AttentionPast(*entries), q, k, v, config.margin)


def _check_attends(module: nn.Module, plan: Plan, q: Any, k: Any, given: Any) -> None:
    if (reason := why_not(plan, q, k, *given)) is not None:
        path = "/".join(module.path)
        raise ValueError(f"train.fp8.attention=True, and {path} cannot attend in FP8: {reason}; use False")


def _products(config: Fp8Config, x: Any, layers: Any, weights: Any) -> list[Array]:
    """Return x W of each layer. They share x in FP8, which is rounded once."""
    found, rounded = [], None
    for layer, weight in zip(layers, weights, strict=True):
        if not runs_in_fp8(layer, x, config):
            found.append(layer.multiply(x, weight.kernel))
            continue
        given = x.astype(layer.dtype)
        past = _past(layer) if config.scaling == "delayed" else None
        if rounded is None:
            rounded = round_once(given, None if past is None else past.x, config.margin)
        elif past is not None:
            # Stop the gradient of the others: what they observe of x would be added to what the first does
            past = past._replace(x=jax.lax.stop_gradient(past.x))
        options: dict[str, Any] = {
            "past": past,
            "margin": config.margin,
            "rounded": rounded,
            "wide": layer.joins,
        }
        found.append(fp8_product(layer.equation, given, weight.kernel, **options))
    return list(_written(tuple(found))) if all(layer.joins for layer in layers) else found


@jax.custom_jvp
def _written(products: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the products of a gated MLP, written as they are.

    XLA would otherwise write the gated product too, and read it to round it. Gradients pass without a barrier.
    """
    return jax.lax.optimization_barrier(products)


@_written.defjvp
def _written_jvp(primals: Any, tangents: Any) -> Any:
    return _written(*primals), tangents[0]


def _past(layer: Linear) -> Past:
    """Return what a layer remembers."""
    entries: Any = layer.get_variable(FP8, _AMAX)
    return Past(*entries)


def find_sites[T](config: Fp8Config, trace: Callable[[], T]) -> tuple[frozenset[tuple[str, ...]], T]:
    """Return paths of the `Linear`s, and of layers of attention, that a trace can run in FP8, and the trace's result.

    Raises:
      ValueError: there are none, or a pattern of `keep` matches no product, or a layer of attention cannot.
    """
    found: set[tuple[str, ...]] = set()
    attending: set[tuple[str, ...]] = set()
    seen: set[str] = set()

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        if _attends(context, config, args):
            plan, q, k, _, given = args
            _check_attends(context.module, plan, q, k, given)
            attending.add(context.module.path)
        if _multiplies(context):
            x, layers, _ = args
            for layer in layers:
                seen.add("/".join(layer.path))
                if runs_in_fp8(layer, x, config):
                    found.add(layer.path)
        return call(*args, **options)

    with nn.intercept_methods(record):
        result = trace()
    for pattern in config.keep:
        if not any(fnmatchcase(path, pattern) for path in seen):
            raise ValueError(
                f"train.fp8.keep = {pattern!r} matches none of the model's {len(seen)} products, such as "
                f"{sorted(seen)[0] if seen else 'none'!r}"
            )
    if not found | attending:
        raise ValueError(
            f"precision='fp8' finds no product to run in FP8 among {len(seen)}: a Linear needs bfloat16 and sides "
            f"that divide by {MULTIPLE}; use precision='dtype'"
        )
    if config.attention and not attending:
        raise ValueError("train.fp8.attention=True finds no causal attention without a window: use False")
    return frozenset(found | attending), result


def first_amax(config: Fp8Config, sites: Collection[tuple[str, ...]], params: Mapping[str, Any]) -> Any:
    """Return the collection `FP8` before anything was observed: Float[layers, 3, H] zeros for each site.

    Its rows are those of `ROLES`, or for attention the fields of `AttentionPast`. A scanned site has an axis of layers,
    as its kernel has.

    Args:
      config: how scales are made.
      sites: of `find_sites`.
      params: the model's parameters, or their shapes with logical names.
    """
    flat = flatten_dict(params)
    made = {}
    for path in sorted(sites):
        attends = (*path, "kernel") not in flat
        kernel = flat[(*path, "q", "kernel") if attends else (*path, "kernel")]
        names = getattr(kernel, "names", ())
        layers = nn.meta.unbox(kernel).shape[: sum(name == "layers" for name in names)]
        roles = len(AttentionPast._fields) if attends else len(ROLES)
        made[(*path, _AMAX)] = jnp.zeros((*layers, roles, config.history), jnp.float32)
    return unflatten_dict(made)


def next_amax(amax: Any, observed: Any) -> Any:
    """Return the largest entries with those of a step in front, and the oldest dropped.

    An entry that is not finite backs off: twice the largest of the history stands for it, so that the scale halves.

    Args:
      amax: the collection `FP8`.
      observed: its gradient, entries in the first place.
    """

    def shift(history: Float[Array, "*L R H"], seen: Float[Array, "*L R H"]) -> Float[Array, "*L R H"]:
        new, top = seen[..., :1], jnp.max(history, -1, keepdims=True)
        new = jnp.where(jnp.isfinite(new), new, 2 * jnp.where(top > 0, top, 1))
        return jnp.concatenate([new, history[..., :-1]], -1)

    return jax.tree.map(shift, amax, observed)
