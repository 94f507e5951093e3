"""Attention in tiles: calls over some of the queries and keys, merged by log-sum-exp, and their gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import EMPTY_LSE, Partial, masks, partial_attention, partial_attention_backward
from pallas_kernels.attention.masks import Mask


class Keys(NamedTuple):
    """Keys, values, and what travels with them.

    Attributes:
      k, v: of S tokens.
      segment_ids: their documents; None where all are of one.
      lengths: tokens of content with which each of R equal runs begins; None if all tokens are content.
    """

    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G K"]
    segment_ids: Int[Array, "B S"] | None
    lengths: Int[Array, "B R"] | None = None


class Tile(NamedTuple):
    """A run of queries and an equally long run of keys that meet in one call of the kernel.

    Attributes:
      q_start, k_start: where the runs begin; the device may decide (a traced number).
      size: their length; if keys come with lengths, that of their runs.
      causal, window: of the mask, by index within the runs.
      reverse: both runs are read backwards, so that `causal` hides the keys before a query instead.
      live: whether the tile counts; None for always. A dead tile is computed too, so that all devices do the same.
      each: number of runs that follow each other in queries and keys; run i of the queries meets only run i of the
      keys.
      own: queries and keys are the same tokens.
      shared: only one document's tokens meet: that with which the run of queries begins and the run of keys ends. Keys
        come in reverse order and their ids do not, so that this document's tokens come first in both runs.
      reaches: for each of as many runs of the queries, how many of the first keys it sees; only for `attend`.
    """

    q_start: int | Int[Array, ""]
    k_start: int | Int[Array, ""]
    size: int
    causal: bool
    window: int | None = None
    reverse: bool = False
    live: Bool[Array, ""] | None = None
    each: int = 1
    own: bool = False
    shared: bool = False
    reaches: tuple[Int[Array, ""], ...] | None = None


def attend(
    tile: Tile, q: Array, q_ids: Array | None, keys: Keys, options: dict[str, Any], merged: Partial | None
) -> Partial:
    """Return `merged` with the tile merged into it, in fp32; if it is None, the tile has all queries.

    With the option `cast_output` the result is in q's dtype, and the tile must have all queries.
    """
    old = None if merged is None else _slice(tile, merged)
    accumulator = None if old is None else _each(_fold, tile, old)
    operands = _operands(tile, q, q_ids, keys)
    found = _each(_unfold, tile, partial_attention(*operands, accumulator=accumulator, **options))
    if tile.live is not None:
        if old is None:
            old = Partial(jnp.zeros_like(found.o), jnp.full_like(found.lse, EMPTY_LSE))
        found = Partial(*(jnp.where(tile.live, new, x) for new, x in zip(found, old, strict=True)))
    if options.get("cast_output"):
        return found
    if merged is None:
        return Partial(found.o.astype(jnp.float32), found.lse)
    o = lax.dynamic_update_slice_in_dim(merged.o, found.o, tile.q_start, 1)
    return Partial(o, lax.dynamic_update_slice_in_dim(merged.lse, found.lse, tile.q_start, 2))


def tile_gradients(
    tile: Tile,
    q: Array,
    q_ids: Array | None,
    keys: Keys,
    merged: Partial,
    do: Array,
    options: dict[str, Any],
) -> tuple[Array, Array, Array]:
    """Return the tile's share of dq, dk and dv, for only its runs of queries and keys."""
    q, k, v, mask = _operands(tile, q, q_ids, keys)
    own, do = _each(_fold, tile, _slice(tile, merged)), _run(tile, do, tile.q_start)
    gradients = partial_attention_backward(q, k, v, own, do, mask, **options)
    dq, dk, dv = (_unfold(tile, x) for x in gradients)
    if tile.live is None:
        return dq, dk, dv
    zero = jnp.zeros((), dq.dtype)
    return jnp.where(tile.live, dq, zero), jnp.where(tile.live, dk, zero), jnp.where(tile.live, dv, zero)


def add_at(total: Array, x: Array, start: int | Array, axis: int) -> Array:
    """Return `total` with x added from `start` on, along `axis`, in the precision of `total`."""
    old = lax.dynamic_slice_in_dim(total, start, x.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, old + x.astype(total.dtype), start, axis)


def _operands(tile: Tile, q: Array, q_ids: Array | None, keys: Keys) -> tuple[Array, Array, Array, Mask]:
    k, v = (_run(tile, x, tile.k_start) for x in keys[:2])
    return _run(tile, q, tile.q_start), k, v, _mask(tile, q.shape[0], q_ids, keys)


def _mask(tile: Tile, rows: int, q_ids: Array | None, keys: Keys) -> Mask:
    """Return what a query of the tile may see."""
    mask = masks.FULL
    if q_ids is not None and keys.segment_ids is not None:
        here, there = _run(tile, q_ids, tile.q_start), _run(tile, keys.segment_ids, tile.k_start)
        if tile.shared:
            q_lengths, kv_lengths = _shared(here, there)
            mask = masks.query_lengths(q_lengths) & masks.key_lengths(kv_lengths)
        else:
            mask = masks.documents(here, None if tile.own else there)
    if tile.reaches is not None:
        reaches = jnp.stack(tile.reaches).astype(jnp.int32)
        mask &= masks.key_lengths(jnp.broadcast_to(reaches, (rows, len(tile.reaches))))
    if keys.lengths is not None:
        runs = lax.dynamic_slice_in_dim(keys.lengths, tile.k_start // tile.size, tile.each, 1)
        mask &= masks.key_lengths(runs.reshape(-1))
    return masks.band(tile.causal, tile.window) & mask


def _shared(here: Int[Array, "B T"], there: Int[Array, "B S"]) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Count tokens in each of two runs of the document that ends one and begins the other."""
    first, last = here[:, :1], jnp.max(there, 1, keepdims=True)
    shared = (first > 0) & (first == last)
    q_lengths, kv_lengths = (jnp.sum(shared & (x == first), 1, dtype=jnp.int32) for x in (here, there))
    return q_lengths, kv_lengths


def _run(tile: Tile, x: Array, start: int | Array) -> Array:
    span = tile.each * tile.size
    return _fold(tile, x if x.shape[1] == span else lax.dynamic_slice_in_dim(x, start, span, 1))


def _fold(tile: Tile, x: Array) -> Array:
    """Return runs as rows, in the order in which the kernel reads them."""
    x = rearrange(x, "b (r s) ... -> (b r) s ...", s=tile.size)
    return jax.lax.rev(x, (1,)) if tile.reverse else x


def _unfold(tile: Tile, x: Array) -> Array:
    x = jax.lax.rev(x, (1,)) if tile.reverse else x
    return rearrange(x, "(b r) s ... -> b (r s) ...", r=tile.each)


def _each(change: Callable[[Tile, Array], Array], tile: Tile, x: Partial) -> Partial:
    return Partial(change(tile, x.o), change(tile, x.lse.swapaxes(1, 2)).swapaxes(1, 2))


def _slice(tile: Tile, merged: Partial) -> Partial:
    span = tile.each * tile.size
    return Partial(
        lax.dynamic_slice_in_dim(merged.o, tile.q_start, span, 1),
        lax.dynamic_slice_in_dim(merged.lse, tile.q_start, span, 2),
    )
