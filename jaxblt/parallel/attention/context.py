"""Context parallelism: exact attention over a sequence that is split among devices, in three modes."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from jaxblt.parallel.attention.all_to_all import attend_by_heads
from jaxblt.parallel.attention.by_time import Seen, ring_by_time
from jaxblt.parallel.attention.hops import plan_exchange
from jaxblt.parallel.attention.packed_ring import packed_ring_attention
from jaxblt.parallel.attention.plan import (
    Asked,
    Call,
    ContextParallel,
    Implementation,
    Plan,
    plan_call,
    query_runs,
)
from jaxblt.parallel.attention.ring import ring_attention
from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.attention.window import band_attention
from jaxblt.parallel.content import content_first
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout, in_zigzag
from jaxblt.parallel.sequence import over_sequence, seq_axis
from pallas_kernels.attention import attention, masks, split_attention
from pallas_kernels.attention.arguments import check_arguments, zero_where_not


def context_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    causal: bool,
    window: int | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
    packed: bool = True,
    mode: ContextParallel | None = None,
    layout: SequenceLayout = CONTIGUOUS,
    implementation: Implementation | Literal["mosaic_gpu"] = None,
) -> Float[Array, "B T H K"]:
    """Return `pallas_kernels.attention` of rows whose tokens are split along the mesh axis `seq`.

    - "ring": a ring pass of keys and values (see `ring_attention`). Memory and traffic of a device: its share. A
      causal mask without a window is balanced by swapping half-stretches into the zig-zag layout and back. A
      window takes a halo of keys from the neighbours instead (see `band_attention`).
    - "all_to_all": every device gets all tokens of its share of the heads, and back (DeepSpeed-Ulysses,
      2309.14509; see `attend_by_heads`). The kernel takes any mask; heads must divide among the devices.
    - "all_gather": every device gets all keys and values. Any mask and any heads; memory O(T).
    - None: "all_to_all" with ALiBi, because the tiles of a ring do not know distances. Also without a window, if heads
      divide, tokens are in order, and a device has at most `SHORT` of them. Else "ring".

    Args:
      implementation: as for `attention`. A ring without a window also takes "mosaic_gpu", forward only (see
        `partial_attention`). Arguments that are not explained here are those of `attention`. A token's place in the
        sequence is its position.
      packed: rows may hold several documents. False promises one a row. Then holes and padding are sorted behind each
        run of tokens that a kernel takes, because kernels know lengths but no documents. That changes nothing if places
        count (a window, ALiBi), nor in mode "all_gather". In a ring, rows of several documents go to XLA. In causal
        rings on Hopper GPUs they go to cuDNN if ids rise along every row (see `packed_ring`), which the devices find
        out. cuDNN's kernels have no batching rule: under `jax.vmap` pass implementation="xla".
      mode: the exchange.
      layout: of all the arrays, along the sequence; "zigzag" if the host laid them out so, for mode "ring".

    Raises:
      ValueError: before compiling, with the fix: as `attention`, or the length or the heads do not divide among
        the devices, a window is longer than a device's stretch, the mode or the named kernel does not take this, or
        the mode is "ring" inside `reference_ops`.
    """
    axis = seq_axis((q, k, v))
    if axis is None:
        raise ValueError("no mesh with a 'seq' axis is in force: call pallas_kernels.attention.attention")
    check_arguments(q, k, v, masks.band(causal, window) & masks.documents(segment_ids), alibi_slopes)
    plan = plan_call(
        Call(
            Asked(
                heads=q.shape[2],
                groups=k.shape[2],
                width=q.shape[3],
                causal=causal,
                window=window,
                alibi=alibi_slopes is not None,
                packed=packed,
                layout=layout,
                mode=mode,
                scale=scale,
                implementation=implementation,
            ),
            rows=q.shape[0],
            tokens=q.shape[1],
            dtype=q.dtype,
            has_ids=segment_ids is not None,
            axis=axis,
            split=True,
        )
    )
    return attend_rows(plan, q, k, v, segment_ids, alibi_slopes)


def attend_rows(
    plan: Plan,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    hides: Int[Array, "B T"] | Int[Array, "B"] | None,
    slopes: Float[Array, "H"] | None,
    times: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """Return attention of a call without a cache, as planned.

    `hides` are segment ids, or for whole rows that are sorted their lengths. `times` are the tokens' places in their
    documents, which rules read; None if they are indices of whole rows.
    """
    # Split over `tensor` too, unless what is left to a device there is too little to exchange.
    heads = (plan.by_head, False, False)
    return on_devices(plan, partial(_attend, plan), ((q, k, v), hides, times), (), slopes, heads=heads)


def on_devices[T](
    plan: Plan,
    fn: Callable[[Any, Any, Any], T],
    sequenced: Any,
    batched: Any,
    shared: Any,
    *,
    outputs: Any = True,
    heads: Any = False,
) -> T:
    """Return `fn(sequenced, batched, shared)`, each device on its own rows, and on its stretch if the plan exchanges.

    The arguments are those of `over_sequence`.
    """
    if plan.exchanges:
        return over_sequence(fn, sequenced, batched, shared, outputs=outputs, heads=heads)
    whole = lambda rows, shared: fn(rows[0], rows[1], shared)  # noqa: E731
    return over_batch(whole, (sequenced, batched), shared, heads=(heads, False))


def _attend(plan: Plan, sequenced: Any, _: Any, slopes: Array | None) -> Float[Array, "B T H K"]:
    """Attend on one device, inside an island."""
    (q, k, v), ids, times = sequenced
    if plan.route == "whole":
        mask = plan.band & (masks.documents(ids) if plan.sort is None else masks.token_lengths(ids))
        mask = mask if times is None else mask & masks.positions(times, times)
        return attention(q, k, v, mask, alibi_slopes=slopes, **plan.options)
    if plan.route == "by_time":
        exchange = plan_exchange(plan, q.shape[1], packed=ids is not None)
        ids = jnp.ones_like(times) if ids is None else ids
        return ring_by_time(plan, q, Seen(k, v, ids, times), slopes, exchange).o.astype(q.dtype)
    if plan.route == "all_to_all":
        return attend_by_heads(plan, q, Keys(k, v, ids), slopes)
    if plan.route == "all_gather":
        return _by_gathering(plan, q, Keys(k, v, ids), slopes)
    valid = None if ids is None else ids > 0
    q, k, v = (zero_where_not(valid, x) for x in (q, k, v))
    attend = band_attention if plan.route == "halo" else _by_ring
    return zero_where_not(valid, attend(plan, q, Keys(k, v, ids)))


def _by_ring(plan: Plan, q: Array, keys: Keys) -> Array:
    """Attend by a ring, the holes of each run sorted behind it if kernels know lengths or documents."""
    order = {"axis": plan.devices, "swaps": plan.swaps}
    if plan.sort is None:
        return in_zigzag(partial(ring_attention, plan), q, keys, **order)

    def cut(x: Array) -> Array:
        return rearrange(x, "b (r s) ... -> (b r) s ...", r=plan.runs)

    ids = keys.segment_ids
    assert ids is not None
    content = content_first(cut(ids))
    q, k, v = (content.sort(cut(x)).reshape(x.shape) for x in (q, keys.k, keys.v))
    if plan.sort == "lengths":
        attend, keys = ring_attention, Keys(k, v, None, content.lengths.reshape(-1, plan.runs))
    else:
        attend, keys = packed_ring_attention, Keys(k, v, content.sort(cut(ids)).reshape(ids.shape))
    o = in_zigzag(partial(attend, plan), q, keys, **order)
    return content.restore(cut(o)).reshape(o.shape)


def _by_gathering(plan: Plan, q: Array, keys: Keys, slopes: Array | None) -> Array:
    """Attend to the keys of all devices, gathered on each of them."""
    (rows, length), axis = q.shape[:2], plan.devices
    whole = jax.tree.map(lambda x: lax.all_gather(x, axis.name, axis=1, tiled=True), keys)
    if plan.rule is not None:
        attend = partial(_by_tiles, plan, whole)
        return in_zigzag(attend, q, keys.segment_ids, axis=axis, swaps=plan.swaps)
    here = lax.axis_index(axis.name) * length + jnp.arange(length, dtype=jnp.int32)
    there = jnp.arange(length * axis.size, dtype=jnp.int32)
    mask = plan.band & masks.positions(*(jnp.broadcast_to(x, (rows, x.size)) for x in (here, there)))
    mask &= masks.documents(keys.segment_ids, whole.segment_ids)
    return attention(q, whole.k, whole.v, mask, alibi_slopes=slopes, **plan.options)


def _by_tiles(plan: Plan, whole: Keys, q: Array, ids: Array | None) -> Array:
    """Attend to the gathered keys under a rule, by the lists of this device's tiles."""
    mask = plan.band & masks.documents(ids, whole.segment_ids)
    runs = query_runs(plan.devices.size, balanced=plan.swaps)
    device = lax.axis_index(plan.devices.name)
    return split_attention(q, whole.k, whole.v, mask, runs=runs, device=device, scale=plan.scale)
