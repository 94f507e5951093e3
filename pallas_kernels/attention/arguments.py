"""What a call of attention may be given, and what is done with places where no token is."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from pallas_kernels.attention.choices import check_lists
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.rules import Interval


def check_arguments(q: Any, k: Any, v: Any, mask: Mask, alibi_slopes: Any) -> None:
    """Raise ValueError, naming the value and the fix, for arguments that do not fit together."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"expected q [B, T, H, K] and k, v of one shape [B, S, G, K], got {q.shape}, {k.shape}, {v.shape}"
        )
    (batch, queries, heads, width), (_, keys, groups, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != width or heads % groups:
        raise ValueError(
            f"q {q.shape} and k {k.shape} must agree in B and K, and H = {heads} divide by G = {groups}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them first")
    if alibi_slopes is not None and alibi_slopes.shape != (heads,):
        raise ValueError(
            f"alibi_slopes must have one slope a head, shape {(heads,)}, got {alibi_slopes.shape}"
        )
    compares = mask.rule is not None and mask.rule.compares_places
    by_distance = mask.interval != Interval() or compares or alibi_slopes is not None
    if queries != keys and mask.positions is None and by_distance:
        raise ValueError(
            f"T = {queries} queries against S = {keys} keys: causal, window, rules and ALiBi compare positions, "
            "so add masks.positions(q, kv)"
        )
    _check_shapes(mask, batch, queries, keys)
    check_lists(mask.rule, batch, queries, groups, None if mask.positions is not None else keys)


def _check_shapes(mask: Mask, batch: int, queries: int, keys: int) -> None:
    expected = ((batch, queries), (batch, keys))
    for name, given in (("segment ids", mask.segments), ("positions", mask.positions)):
        if given is not None and (given.q.shape, given.of_keys.shape) != expected:
            raise ValueError(
                f"{name} of queries and keys must be {expected[0]} and {expected[1]}, "
                f"got {given.q.shape}, {given.of_keys.shape}"
            )
    for name, lengths in (("query_lengths", mask.q_lengths), ("key_lengths", mask.kv_lengths)):
        if lengths is not None and lengths.shape != (batch,):
            raise ValueError(f"{name} must have shape {(batch,)}, got {lengths.shape}")


def without_padding(
    q: Array, k: Array, v: Array, mask: Mask
) -> tuple[Array, Array, Array, Bool[Array, "B T"] | None]:
    """Return q, k, v with zeros where no token is (there may be anything, NaN too), and which queries are tokens."""
    q_valid, kv_valid = mask.valid(q.shape[1], k.shape[1])
    return zero_where_not(q_valid, q), zero_where_not(kv_valid, k), zero_where_not(kv_valid, v), q_valid


def zero_where_not(valid: Bool[Array, "B T"] | None, x: Array) -> Array:
    """Return x, with zeros in value and in gradient where not `valid`."""
    return x if valid is None else jnp.where(valid[:, :, None, None], x, jnp.zeros((), x.dtype))
