"""A routed adapter made static: the mean of its weight updates, by SVD."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.attach import check_sites, stacks_of
from jaxblt.adapters.config import AdapterConfig
from jaxblt.adapters.losses import AdapterLosses
from jaxblt.adapters.merge import given_code, has_adapter, limited_code, map_sites, site_name
from jaxblt.adapters.params import without_routers
from jaxblt.adapters.router import ROUTER
from jaxblt.adapters.site import ADAPTER

HIGHEST = jax.lax.Precision.HIGHEST


def mean_codes(side: Mapping[str, Any]) -> dict[str, Float[Array, "W"]]:
    """The mean code over tokens of each routed stack, of all levels, from what a pass sowed.

    `side` is the second result of `model.apply({"params": params}, ids, mutable=["metrics"], ...)`.
    """
    stacks = side.get("metrics", {})
    return {name: _mean_code(tree[ROUTER]) for name, tree in stacks.items() if ROUTER in tree}


def _mean_code(tree: Mapping[str, Any]) -> Float[Array, "W"]:
    """Of a router, or of several in the order of their names."""
    if "mean_code" in tree:
        return tree["mean_code"][0].value
    return jnp.concatenate([_mean_code(tree[name]) for name in sorted(tree)])


def distill[C](
    config: C,
    params: Any,
    codes: Float[Array, "W"] | Mapping[str, Float[Array, "W"]],
    *,
    rank: int | None = None,
) -> tuple[C, Any]:
    """The config and parameters of the model with static adapters whose update is dW at the mean code.

    dW is linear in the code, so that its mean is dW at the mean code; a governor bounds it as it bounds that code.
    V diag(c) U is factored by QR and the SVD of an r x r matrix. A smaller rank keeps the largest singular values: the
    best approximation in the Frobenius norm.

    Args:
      config: of the model.
      params: of the whole model.
      codes: the mean code of every stack with a router, or of each by its name (`mean_codes`).
      rank: of the static adapter; None for the rank of each site.

    Raises:
      ValueError: there is no routed adapter, or one has a router in each block, a code is missing or of another length,
        parameters are missing, or `rank` is larger than that of a site.
    """
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
        if adapter.of_blocks:
            raise ValueError(
                f"stack {name!r} has RouterConfig.reads = 'block', a mean code in each block, and distil takes one of "
                "a stack: set reads='stack', or merge it at one code (fuse)"
            )
        if not has_adapter(params[name]):
            raise ValueError(f"stack {name!r} has an adapter and no parameters of it: load them first")
        code = given_code(adapter, codes.get(name) if isinstance(codes, Mapping) else codes)
        assert code is not None
        least = min(each.rank for each in sites)
        if rank is not None and not 1 <= rank <= least:
            raise ValueError(
                f"rank must lie in 1..{least}, the smallest rank of the sites of {name!r}, got {rank}"
            )
        static = _static(adapter, rank)
        changed[name] = dataclasses.replace(routed[name], adapter=static)
        trees[name] = _distilled(params[name], adapter, static, adapter.split(code), rank)
    return dataclasses.replace(config, **changed), trees  # pyright: ignore[reportArgumentType]


def _static(adapter: AdapterConfig, rank: int | None) -> AdapterConfig:
    sites = adapter.sites if rank is None else tuple(pattern for pattern, _ in adapter.patterns)
    plain = {"router": None, "levels": (), "blocks": None, "code": (), "governor": None}
    return dataclasses.replace(
        adapter, sites=sites, rank=rank or adapter.rank, losses=AdapterLosses(), **plain
    )


def _distilled(
    params: Any, adapter: AdapterConfig, static: AdapterConfig, codes: Sequence[Any], rank: int | None
) -> Any:
    def distilled(path: tuple[str, ...], tree: Mapping[str, Any]) -> Any:
        code = codes[adapter.place(site_name(path))]
        return {**tree, ADAPTER: _factored(tree, adapter, static, code, rank)}

    return map_sites(distilled, without_routers(params))


def _factored(
    tree: Mapping[str, Any],
    adapter: AdapterConfig,
    static: AdapterConfig,
    code: Float[Array, "E"],
    rank: int | None,
) -> dict[str, Array]:
    """V and U of a site, of all its layers."""
    down, up = (tree[ADAPTER][name].astype(jnp.float32) for name in ("v", "u"))
    own = down.shape[-1]
    kept = own if rank is None else rank
    lead = tree["kernel"].shape[: down.ndim + up.ndim - 2 - tree["kernel"].ndim]
    v, u = (
        down.reshape(-1, down[(0,) * len(lead)].size // own, own),
        up.reshape(-1, own, up[(0,) * len(lead)].size // own),
    )
    c = jnp.repeat(limited_code(tree[ADAPTER], adapter, v, u, code), own // code.shape[0], axis=-1)
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
    """Factors of the best approximation of V U with `kept` ranks, exact for its own; the first is orthonormal."""
    (left, a), (right, b) = jnp.linalg.qr(v), jnp.linalg.qr(u.T)
    p, sizes, q = jnp.linalg.svd(jnp.matmul(a, b.T, precision=HIGHEST))
    first = jnp.matmul(left, p[:, :kept], precision=HIGHEST)
    return first, jnp.matmul(sizes[:kept, None] * q[:kept], right.T, precision=HIGHEST)
