"""Adapters merged into the weights that they update, in fp32."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxblt.adapters.files.forms import merge_forms
from jaxblt.adapters.update.attach import detach, stacks_of
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.forms import FORM
from jaxblt.adapters.update.governor import bounded, grams
from jaxblt.adapters.update.params import split_params, without_codes
from jaxblt.adapters.update.products import coded_scale
from jaxblt.adapters.update.site import ADAPTER, SCALE, is_adapted
from jaxblt.models.stack import StackConfig
from jaxblt.precision.weights import refuse_quantized


def fuse[C](config: C, params: Any, *, code: Float[Array, "*L W"] | None = None) -> tuple[C, Any]:
    """Return config and parameters of a model without adapters that computes the same: W + (alpha/r) V diag(c) U.

    Where there is a gate, W + W diag(c s). Forms are merged as each of them says.

    Sums are in fp32, whatever the dtype of the parameters: rounding a sum to bfloat16 changes outputs.
    `jaxblt.adapters.merge_drift` says by how much.

    Args:
      config: of the model.
      params: of the whole model.
      code: of a routed adapter, one number a block, and such numbers for each of `AdapterConfig.level_names`; what its
        routers would say is lost. Where each block of the stack has a router, one code for all or [layers, W].

    Raises:
      ValueError: an adapter has a router and there is no code, or the code has another length or is not finite; an
        adapter that the config has is missing among the parameters.
    """
    refuse_quantized(params, "merging adapters")
    trees = dict(split_params(params)[0])
    for name, stack in stacks_of(config).items():
        if stack.adapter is not None:
            if not has_adapter(params[name]):
                raise ValueError(f"stack {name!r} has an adapter and no parameters of it: load them first")
            trees[name] = merge_stack(params[name], stack, code_to_merge(stack, code))
    return detach(config), trees


def merge_stack(params: Any, stack: StackConfig, code: Float[Array, "*L W"] | None) -> Any:
    """Return a stack's parameters with its adapter merged in at a code, None for c = 1, and without router."""

    def merged(path: tuple[str, ...], tree: Mapping[str, Any]) -> Any:
        kernel = tree["kernel"].astype(jnp.float32)
        numbers = code_at(stack, code, path)
        own = tree.get(ADAPTER, {})
        if SCALE in own:
            kernel = kernel * (1 + _aligned(scale_update(tree, stack, numbers, path), kernel.ndim, path))
        elif own:
            kernel = kernel + weight_update(tree, stack.adapter, numbers)
        new = {"kernel": kernel}
        if FORM in tree:
            new = merge_forms(tree, stack, path, kernel, numbers, scanned_layers(stack, path))
        return {name: below for name, below in tree.items() if name not in (ADAPTER, FORM)} | new

    return map_sites(merged, without_codes(params))


def map_sites(change: Callable[[tuple[str, ...], Any], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """Return a stack's parameters, with `change(path, those of a site)` in the place of each site's."""
    if not isinstance(tree, Mapping):
        return tree
    if is_adapted(tree):
        return change(path, tree)
    return {name: map_sites(change, below, (*path, name)) for name, below in tree.items()}


def site_name(path: tuple[str, ...]) -> str:
    """Return the name of a site below its block, from its path below its stack."""
    return "/".join(path[2:])


def code_at(
    stack: StackConfig, code: Float[Array, "*L W"] | None, path: tuple[str, ...]
) -> Float[Array, "*N E"] | None:
    """Return the code of a site's level, by its path below its stack; of each layer, if these have their own."""
    own = stack.adapter.split(code)[stack.adapter.place(site_name(path))]
    return own if own is None or own.ndim == 1 else own[jnp.asarray(layers_at(stack, path))]


def layers_at(stack: StackConfig, path: tuple[str, ...]) -> list[int]:
    """Return the layers whose parameters lie at a path below a stack: of a scan one in each period."""
    period, block = path[0], int(path[1].removeprefix("block_"))
    size, repeats = len(stack.pattern), stack.repeats
    if period == "periods":
        return [size * i + block for i in range(repeats)]
    return [size * (repeats if period == "rest" else int(period.removeprefix("period_"))) + block]


def scanned_layers(stack: StackConfig, path: tuple[str, ...]) -> int:
    """Return the size of the axis of layers that parameters at a path below a stack have in front; 0 for none."""
    return len(layers_at(stack, path)) if _is_scanned(path) else 0


def has_adapter(tree: Any) -> bool:
    """Return whether a tree of parameters holds an adapter's."""
    return isinstance(tree, Mapping) and (is_adapted(tree) or any(map(has_adapter, tree.values())))


def code_to_merge(stack: StackConfig, code: Any) -> Float[Array, "*L W"] | None:
    """Return the code to merge a stack with, None for 1; raise ValueError where its adapter asks for another."""
    adapter: AdapterConfig = stack.adapter
    if adapter.router is None:
        if code is not None:
            raise ValueError("code is of a routed adapter, and this one has no router: leave it None")
        return None
    if code is None:
        raise ValueError(
            f"a routed adapter has another weight at every code: give code, {adapter.width} numbers, to merge one"
        )
    numbers, shapes = jnp.asarray(code, jnp.float32), [(), (stack.num_layers,)]
    shapes = [(*lead, adapter.width) for lead in shapes[: 1 + adapter.of_blocks]]
    if numbers.shape not in shapes:
        each = f" for each level of {adapter.level_names}" if adapter.levels else ""
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"code must have shape {expected}, one number a block{each}, got {numbers.shape}")
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"code must be finite, or every weight is lost, got {np.asarray(numbers)}: give another code"
        )
    return numbers


def weight_update(
    tree: Mapping[str, Any], adapter: AdapterConfig, code: Float[Array, "*N E"] | None
) -> Float[Array, "..."]:
    """Return (alpha/r) V diag(c) U of a `Linear`'s parameters, in the kernel's shape; layers of a scan in front.

    The code is one for all of them, or one for each.
    """
    kernel, down, up = tree["kernel"], tree[ADAPTER]["v"], tree[ADAPTER]["u"]
    rank = down.shape[-1]
    layers = down.ndim + up.ndim - 2 - kernel.ndim
    lead = kernel.shape[:layers]
    v = down.astype(jnp.float32).reshape(*lead, -1, rank)
    u = up.astype(jnp.float32).reshape(*lead, rank, -1)
    numbers = jnp.ones((1,), jnp.float32) if code is None else code
    governed = limited_code(
        tree[ADAPTER], adapter, v.reshape(-1, *v.shape[-2:]), u.reshape(-1, *u.shape[-2:]), numbers
    )
    v = v * jnp.repeat(governed, rank // numbers.shape[-1], axis=-1).reshape(*lead, 1, rank)
    delta = jnp.matmul(v, u, precision=jax.lax.Precision.HIGHEST)
    return (delta * jnp.float32(adapter.scale(rank))).reshape(kernel.shape)


def scale_update(
    tree: Mapping[str, Any], stack: StackConfig, code: Float[Array, "*L E"] | None, path: tuple[str, ...]
) -> Float[Array, "..."]:
    """Return c s of a site with a gate, of all layers at its path."""
    scale, layers = tree[ADAPTER][SCALE].astype(jnp.float32), len(layers_at(stack, path))
    codes = None if code is None else jnp.broadcast_to(code, (layers, code.shape[-1]))
    return coded_scale(scale.reshape(layers, -1), codes).reshape(scale.shape)


def _aligned(scale: Float[Array, "..."], axes: int, path: tuple[str, ...]) -> Float[Array, "..."]:
    """Return scales of outputs, with axes for those that a kernel of so many axes sums over."""
    lead = _is_scanned(path)
    return scale.reshape(*scale.shape[:lead], *(1,) * (axes - scale.ndim), *scale.shape[lead:])


def _is_scanned(path: tuple[str, ...]) -> bool:
    """Return whether parameters at a path below a stack have an axis of layers in front."""
    return path[0] == "periods"


def limited_code(
    tree: Mapping[str, Any],
    adapter: AdapterConfig,
    v: Float[Array, "L K r"],
    u: Float[Array, "L r N"],
    code: Float[Array, "*N E"],
) -> Float[Array, "L E"]:
    """Return the code of each layer of a site within the bound of the adapter's governor, if it has one."""
    codes = jnp.broadcast_to(code.reshape(-1, code.shape[-1]), (len(v), code.shape[-1]))
    governor = adapter.governor
    if governor is None:
        return codes
    scale = adapter.scale(v.shape[-1])
    limit = lambda tau, v, u, c: bounded(governor, tau, c[None, None], *grams(v, u, scale))[0][0, 0]  # noqa: E731
    return jax.vmap(limit)(jnp.asarray(tree["tau"], jnp.float32).reshape(-1), v, u, codes)
