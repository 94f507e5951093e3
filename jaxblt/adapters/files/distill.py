"""A routed adapter made static: the mean of its weight updates, by SVD."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.code.losses import AdapterLosses
from jaxblt.adapters.code.router import ROUTER
from jaxblt.adapters.files.forms import fix_forms
from jaxblt.adapters.files.merge import (
    code_at,
    code_to_merge,
    has_adapter,
    limited_code,
    map_sites,
    scale_update,
    scanned_layers,
    site_name,
)
from jaxblt.adapters.update.attach import check_sites, stacks_of
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.forms import FORM
from jaxblt.adapters.update.params import without_codes
from jaxblt.adapters.update.site import ADAPTER, SCALE
from jaxblt.models.stack import StackConfig
from jaxblt.precision.weights import refuse_quantized

HIGHEST = jax.lax.Precision.HIGHEST


def mean_codes(side: Mapping[str, Any]) -> dict[str, Float[Array, "*L W"]]:
    """Return the mean code over tokens of each routed stack, of all levels, from what a pass sowed.

    Of a stack with a router in each block it has the mean of each, [layers, W]. `side` is the second result of
    `model.apply({"params": params}, ids, mutable=["metrics"], ...)`.
    """
    stacks = side.get("metrics", {})
    found = {name: _mean_code(tree[ROUTER]) for name, tree in stacks.items() if ROUTER in tree}
    apart = {name: _of_blocks(tree) for name, tree in stacks.items() if name not in found}
    return found | {name: jnp.concatenate(codes) for name, codes in apart.items() if codes}


def _mean_code(tree: Mapping[str, Any]) -> Float[Array, "*N W"]:
    """Return the mean code of a router, or of several in the order of their names; periods of a scan in front."""
    if "mean_code" in tree:
        return tree["mean_code"][0].value
    return jnp.concatenate([_mean_code(tree[name]) for name in sorted(tree)], -1)


def _of_blocks(stack: Any) -> list[Float[Array, "N W"]]:
    """Return the mean codes of a stack's blocks, in the order of layers; empty without such routers."""
    codes = []
    for name in sorted(stack, key=_period) if isinstance(stack, Mapping) else ():
        blocks = stack[name] if isinstance(stack[name], Mapping) else {}
        places = sorted((n for n in blocks if ROUTER in blocks[n]), key=lambda n: int(n.split("_")[-1]))
        each = [_mean_code(blocks[place][ROUTER]) for place in places]
        if each:
            both = jnp.stack([code.reshape(-1, code.shape[-1]) for code in each], 1)
            codes.append(both.reshape(-1, both.shape[-1]))
    return codes


def _period(name: str) -> tuple[bool, int]:
    """Return where a stack's child stands among its periods."""
    last = name.split("_")[-1]
    return name == "rest", int(last) if last.isdigit() else 0


def distill[C](
    config: C,
    params: Any,
    codes: Float[Array, "*L W"] | Mapping[str, Float[Array, "*L W"]],
    *,
    rank: int | None = None,
) -> tuple[C, Any]:
    """Return the config and parameters of the model with static adapters whose update is dW at the mean code.

    dW is linear in the code, so that its mean is dW at the mean code; a governor bounds it as it bounds that code.
    V diag(c) U is factored by QR and the SVD of an r x r matrix. A smaller rank keeps the largest singular values: the
    best approximation in the Frobenius norm. A gate's scale becomes c s, and a form what it is at the code.

    Args:
      config: of the model.
      params: of the whole model.
      codes: the mean code of every stack with a router, or of each by its name (`mean_codes`). Where each block has a
        router, one for all blocks or [layers, W].
      rank: of the static adapter; None for the rank of each site.

    Raises:
      ValueError: there is no routed adapter, a code is missing or of another shape, parameters are missing, or `rank`
        is larger than that of a site.
    """
    refuse_quantized(params, "distilling adapters")
    routed = {
        n: s for n, s in stacks_of(config).items() if s.adapter is not None and s.adapter.router is not None
    }
    if not routed:
        raise ValueError(f"{type(config).__name__} has no routed adapter to distil: attach one with a router")
    changed, trees = {}, dict(params)
    for name, sites in check_sites(config).items():
        if name not in routed:
            continue
        adapter = routed[name].adapter
        if not has_adapter(params[name]):
            raise ValueError(f"stack {name!r} has an adapter and no parameters of it: load them first")
        code = code_to_merge(routed[name], codes.get(name) if isinstance(codes, Mapping) else codes)
        assert code is not None
        least = min((each.rank for each in sites), default=adapter.rank)
        if rank is not None and not 1 <= rank <= least:
            raise ValueError(
                f"rank must lie in 1..{least}, the smallest rank of the sites of {name!r}, got {rank}"
            )
        static = _static(adapter, rank)
        changed[name] = dataclasses.replace(routed[name], adapter=static)
        trees[name] = _distilled(params[name], routed[name], static, code, rank)
    return dataclasses.replace(config, **changed), trees  # pyright: ignore[reportArgumentType]


def _static(adapter: AdapterConfig, rank: int | None) -> AdapterConfig:
    sites = adapter.sites if rank is None else tuple(pattern for pattern, _ in adapter.patterns)
    plain = {"router": None, "key_bias": False, "levels": (), "blocks": None, "code": (), "governor": None}
    return dataclasses.replace(
        adapter, sites=sites, rank=rank or adapter.rank, losses=AdapterLosses(), **plain
    )


def _distilled(params: Any, stack: StackConfig, static: AdapterConfig, code: Any, rank: int | None) -> Any:
    def distilled(path: tuple[str, ...], tree: Mapping[str, Any]) -> Any:
        own = code_at(stack, code, path)
        assert own is not None
        new = {}
        if SCALE in tree.get(ADAPTER, {}):
            new[ADAPTER] = {SCALE: scale_update(tree, stack, own, path)}
        elif ADAPTER in tree:
            new[ADAPTER] = _factored(tree, stack.adapter, static, own, rank)
        if FORM in tree:
            forms = stack.adapter.forms_at(site_name(path))
            new[FORM] = fix_forms(tree, forms, own, scanned_layers(stack, path))
        return {**tree, **new}

    return map_sites(distilled, without_codes(params))


def _factored(
    tree: Mapping[str, Any],
    adapter: AdapterConfig,
    static: AdapterConfig,
    code: Float[Array, "*N E"],
    rank: int | None,
) -> dict[str, Array]:
    """Return V and U of a site, of all its layers."""
    down, up = (tree[ADAPTER][name].astype(jnp.float32) for name in ("v", "u"))
    own = down.shape[-1]
    kept = own if rank is None else rank
    lead = tree["kernel"].shape[: down.ndim + up.ndim - 2 - tree["kernel"].ndim]
    v, u = (
        down.reshape(-1, down[(0,) * len(lead)].size // own, own),
        up.reshape(-1, own, up[(0,) * len(lead)].size // own),
    )
    c = jnp.repeat(limited_code(tree[ADAPTER], adapter, v, u, code), own // code.shape[-1], axis=-1)
    v, u = jax.vmap(lambda v, u, c: truncated(v * c[None] * jnp.float32(adapter.scale(own)), u, kept))(
        v, u, c
    )
    u = u / jnp.float32(static.scale(kept))
    return {
        "v": v.reshape(*down.shape[:-1], kept),
        "u": u.reshape(*up.shape[: len(lead)], kept, *up.shape[len(lead) + 1 :]),
    }


def truncated(
    v: Float[Array, "K r"], u: Float[Array, "r N"], kept: int
) -> tuple[Float[Array, "K k"], Float[Array, "k N"]]:
    """Return factors of the best approximation of V U with `kept` ranks; the first is orthonormal."""
    (left, a), (right, b) = jnp.linalg.qr(v), jnp.linalg.qr(u.T)
    p, sizes, q = jnp.linalg.svd(jnp.matmul(a, b.T, precision=HIGHEST))
    first = jnp.matmul(left, p[:, :kept], precision=HIGHEST)
    return first, jnp.matmul(sizes[:kept, None] * q[:kept], right.T, precision=HIGHEST)
