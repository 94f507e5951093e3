"""Attention in tiles: calls over some of the queries and keys, merged by log-sum-exp, and their gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import EMPTY_LSE, Part, attend_part, pull_part


class Keys(NamedTuple):
    """Keys, values, and what travels with them.

    Attributes:
      k, v: of S tokens.
      segment_ids: their documents; None where all are of one.
      lengths: of the content with which each of R equal runs of the tokens begins; None where all is content.
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
      live: whether the tile counts at all; None for always. A dead tile costs what a live one does, so that
        all devices do the same.
      each: as many runs follow each other in queries and keys, and each meets its own alone.
      own: queries and keys are the same tokens.
      shared: those meet alone that are of the document with which the queries' run begins and the keys' ends. Keys come
        in reverse order while their ids stay, so that in both runs its tokens come first.
      reaches: each of as many runs of the queries sees so many of the keys, the first ones; of `attend` alone.
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
    tile: Tile, q: Array, q_ids: Array | None, keys: Keys, options: dict[str, Any], merged: Part | None
) -> Part:
    """`merged` with the tile merged into it, in fp32; None is nothing yet, and the tile has all queries.

    With the option `rounded`, which takes a tile that has them all, in q's dtype.
    """
    arrays, marks = _operands(tile, q, q_ids, keys)
    old = None if merged is None else _cut_part(tile, merged)
    onto = None if old is None else _each_part(_fold, tile, old)
    part = _each_part(_unfold, tile, attend_part(*arrays, **marks, onto=onto, **options))
    if tile.live is not None:
        if old is None:
            old = Part(jnp.zeros_like(part.o), jnp.full_like(part.lse, EMPTY_LSE))
        part = Part(*(jnp.where(tile.live, new, x) for new, x in zip(part, old, strict=True)))
    if options.get("rounded"):
        return part
    if merged is None:
        return Part(part.o.astype(jnp.float32), part.lse)
    o = lax.dynamic_update_slice_in_dim(merged.o, part.o, tile.q_start, 1)
    return Part(o, lax.dynamic_update_slice_in_dim(merged.lse, part.lse, tile.q_start, 2))


def tile_gradients(
    tile: Tile,
    q: Array,
    q_ids: Array | None,
    keys: Keys,
    merged: Part,
    do: Array,
    options: dict[str, Any],
) -> tuple[Array, Array, Array]:
    """What the tile adds to dq, dk and dv, for its runs of queries and keys alone."""
    arrays, marks = _operands(tile, q, q_ids, keys)
    part = _each_part(_fold, tile, _cut_part(tile, merged))
    gradients = pull_part(*arrays, part, _run(tile, do, tile.q_start), **marks, **options)
    dq, dk, dv = (_unfold(tile, x) for x in gradients)
    if tile.live is None:
        return dq, dk, dv
    zero = jnp.zeros((), dq.dtype)
    return jnp.where(tile.live, dq, zero), jnp.where(tile.live, dk, zero), jnp.where(tile.live, dv, zero)


def add_at(total: Array, x: Array, start: int | Array, axis: int) -> Array:
    """`total` with x added from `start` on, along `axis`, in the precision of `total`."""
    old = lax.dynamic_slice_in_dim(total, start, x.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, old + x.astype(total.dtype), start, axis)


def _operands(
    tile: Tile, q: Array, q_ids: Array | None, keys: Keys
) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    k, v = (_run(tile, x, tile.k_start) for x in keys[:2])
    marks: dict[str, Any] = {"causal": tile.causal, "window": tile.window}
    if q_ids is not None and keys.segment_ids is not None:
        here = _run(tile, q_ids, tile.q_start)
        there = _run(tile, keys.segment_ids, tile.k_start)
        if tile.shared:
            marks["q_lengths"], marks["kv_lengths"] = _shared(here, there)
        else:
            marks["q_segment_ids"], marks["kv_segment_ids"] = here, there
            marks["same_tokens"] = tile.own
    if tile.reaches is not None:
        reaches = jnp.stack(tile.reaches).astype(jnp.int32)
        marks["kv_lengths"] = jnp.broadcast_to(reaches, (q.shape[0], len(tile.reaches)))
    if keys.lengths is not None:
        runs = lax.dynamic_slice_in_dim(keys.lengths, tile.k_start // tile.size, tile.each, 1)
        marks["kv_lengths"] = runs.reshape(-1)
    return (_run(tile, q, tile.q_start), k, v), marks


def _shared(here: Int[Array, "B T"], there: Int[Array, "B S"]) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Tokens in each of two runs of the document with which one begins and the other ends; 0 if there is none."""
    first, last = here[:, :1], jnp.max(there, 1, keepdims=True)
    shared = (first > 0) & (first == last)
    q_lengths, kv_lengths = (jnp.sum(shared & (x == first), 1, dtype=jnp.int32) for x in (here, there))
    return q_lengths, kv_lengths


def _run(tile: Tile, x: Array, start: int | Array) -> Array:
    span = tile.each * tile.size
    return _fold(tile, x if x.shape[1] == span else lax.dynamic_slice_in_dim(x, start, span, 1))


def _fold(tile: Tile, x: Array) -> Array:
    """Runs as rows, in the order in which the kernel reads them."""
    x = x.reshape(-1, tile.size, *x.shape[2:])
    return jax.lax.rev(x, (1,)) if tile.reverse else x


def _unfold(tile: Tile, x: Array) -> Array:
    x = jax.lax.rev(x, (1,)) if tile.reverse else x
    return x.reshape(-1, tile.each * tile.size, *x.shape[2:])


def _each_part(change: Callable[[Tile, Array], Array], tile: Tile, part: Part) -> Part:
    return Part(change(tile, part.o), change(tile, part.lse.swapaxes(1, 2)).swapaxes(1, 2))


def _cut_part(tile: Tile, merged: Part) -> Part:
    span = tile.each * tile.size
    return Part(
        lax.dynamic_slice_in_dim(merged.o, tile.q_start, span, 1),
        lax.dynamic_slice_in_dim(merged.lse, tile.q_start, span, 2),
    )
