"""Context parallelism: exact attention over a sequence that is split among devices, in three modes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from jaxblt.parallel.attention.all_to_all import attend_by_heads
from jaxblt.parallel.attention.packed_ring import can_run_on_cudnn, packed_ring_attention
from jaxblt.parallel.attention.ring import Ring, ring_attention
from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.attention.window import Band, band_attention
from jaxblt.parallel.content import content_first
from jaxblt.parallel.islands import head_devices
from jaxblt.parallel.layout import CONTIGUOUS, ZIGZAG, SequenceLayout, to_contiguous, to_zigzag
from jaxblt.parallel.sequence import SeqAxis, over_sequence, seq_axis
from pallas_kernels.attention import attention, masks
from pallas_kernels.attention.arguments import check_arguments, zero_where_not
from pallas_kernels.attention.masks import Mask
from pallas_kernels.runtime import has_reference_ops

ContextParallel = Literal["ring", "all_to_all", "all_gather"]
"""How devices exchange what attention over a split sequence needs."""
Implementation = Literal["reference", "xla", "cudnn"] | None
"""Which attention runs on a device; None picks the best that the device and the shapes allow."""

SHORT = 8192
"""Tokens a device up to which heads are scattered where they can be. With 32 query and 8 key heads of 128 on four
H200s, forward and backward: all-to-all 1.5 ms, a ring with its swaps 2.5 ms at 2,048; 15.4 and 19.0 ms at 8,192."""


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
    """`pallas_kernels.attention` of whole rows whose tokens are split along the mesh axis `seq`.

    - "ring": a ring pass of keys and values (see `ring`). Memory and traffic of a device: its share. A
      causal mask without a window is balanced by swapping half-stretches into the zig-zag layout and back. A
      window takes a halo of keys from the neighbours instead (see `band`).
    - "all_to_all": every device gets all tokens of its share of the heads, and back (DeepSpeed-Ulysses,
      2309.14509; see `by_heads`). The kernel takes any mask; heads must divide among the devices.
    - "all_gather": every device gets all keys and values. Any mask and any heads; memory O(T).
    - None: "all_to_all" with ALiBi, whose distances the tiles of a ring do not know, and without a window where heads
      divide, tokens are in order, and a device has no more than `SHORT` of them; else "ring".

    Args:
      implementation: as for `attention`, as are arguments that are not explained here, and a ring without a window also
        takes "mosaic_gpu", forward only (see `partial_attention`). A token's place in the sequence is its position.
      packed: rows may hold several documents. False promises one a row: its holes and padding are then sorted behind
        each run of tokens that a kernel takes, for kernels that know lengths but no documents. It changes nothing
        where places count (a window, ALiBi) and in mode "all_gather". Rows of several go to XLA in a ring; on Hopper
        GPUs to cuDNN in causal rings if ids rise along every row (see `packed_ring`), which is found out there.
        cuDNN's kernels have no batching rule: under `jax.vmap` pass implementation="xla".
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
    length = axis.whole(q.shape[1])
    window = None if window is not None and window >= length else window
    counts = q.shape[2], k.shape[2]
    heads_divide = not any(count // head_devices(*counts) % axis.size for count in counts)
    if mode is None:
        short = length <= SHORT * axis.size and window is None and layout == CONTIGUOUS
        by_heads = heads_divide and short and implementation != "mosaic_gpu"
        mode = "all_to_all" if alibi_slopes is not None or by_heads else "ring"
    _check(axis, mode, length, causal, window, alibi_slopes, layout, implementation)
    mask, options = masks.band(causal, window), {"scale": scale, "implementation": implementation}
    by_length = segment_ids is not None and not packed and window is None and alibi_slopes is None

    def island(sequenced: Any, _: Any, slopes: Array | None) -> Float[Array, "B T H K"]:
        (q, k, v), ids = sequenced
        keys = Keys(k, v, ids)
        if mode == "all_to_all":
            return attend_by_heads(axis, q, keys, slopes, mask, options, by_length=by_length)
        if mode == "all_gather":
            return _by_gathering(axis, q, keys, slopes, mask, options)
        valid = None if ids is None else ids > 0
        q, k, v = (zero_where_not(valid, x) for x in (q, k, v))
        keys = Keys(k, v, ids)
        if window is not None:
            o = band_attention(Band(axis, causal, window, **options), q, keys)
        else:
            ring = Ring(axis, causal, layout, **options)
            o = _ring_pass(ring, q, keys, packed=packed, by_length=by_length)
        return zero_where_not(valid, o)

    if mode == "all_to_all":
        _check_heads(axis, *counts, alibi_slopes)
    # Over `tensor` too, unless what is left to a device there is too little to exchange.
    by_head = mode != "all_to_all" or heads_divide
    return over_sequence(island, ((q, k, v), segment_ids), (), alibi_slopes, heads=(by_head, False))


def _ring_pass(ring: Ring, q: Array, keys: Keys, *, packed: bool, by_length: bool) -> Array:
    """A ring, by documents or lengths where kernels know them; tokens in order are swapped under a causal mask."""
    swap = ring.causal and ring.layout == CONTIGUOUS
    ring = replace(ring, layout=ZIGZAG) if swap else ring
    by_documents = keys.segment_ids is not None and packed and can_run_on_cudnn(ring, q, keys.k)
    attend = packed_ring_attention if by_documents else ring_attention
    attend = partial(_swapped, attend, ring) if swap else partial(attend, ring)
    sort = by_length or by_documents
    return _sorted(ring.runs, attend, q, keys, by_length=by_length) if sort else attend(q, keys)


def _sorted(
    runs: int, attend: Callable[[Array, Keys], Array], q: Array, keys: Keys, *, by_length: bool
) -> Array:
    """`attend` where the holes of each run come last in it, and keys have lengths or else ids."""

    def cut(x: Array) -> Array:
        return rearrange(x, "b (r s) ... -> (b r) s ...", r=runs)

    assert keys.segment_ids is not None
    content = content_first(cut(keys.segment_ids))
    sorted_q, k, v = (content.sort(cut(x)).reshape(x.shape) for x in (q, keys.k, keys.v))
    if by_length:
        sorted_keys = Keys(k, v, None, content.lengths.reshape(-1, runs))
    else:
        sorted_keys = Keys(k, v, content.sort(cut(keys.segment_ids)).reshape(keys.segment_ids.shape))
    o = attend(sorted_q, sorted_keys)
    return content.restore(cut(o)).reshape(o.shape)


def _swapped(attend: Callable[[Ring, Array, Keys], Array], ring: Ring, q: Array, keys: Keys) -> Array:
    q, keys = jax.tree.map(lambda x: to_zigzag(x, ring.axis), (q, keys))
    return to_contiguous(attend(ring, q, keys), ring.axis)


def _by_gathering(
    axis: SeqAxis, q: Array, keys: Keys, slopes: Array | None, mask: Mask, options: dict[str, Any]
) -> Array:
    rows, length = q.shape[:2]
    whole = jax.tree.map(lambda x: lax.all_gather(x, axis.name, axis=1, tiled=True), keys)
    here = lax.axis_index(axis.name) * length + jnp.arange(length, dtype=jnp.int32)
    there = jnp.arange(length * axis.size, dtype=jnp.int32)
    mask &= masks.positions(*(jnp.broadcast_to(x, (rows, x.size)) for x in (here, there)))
    mask &= masks.documents(keys.segment_ids, whole.segment_ids)
    return attention(q, whole.k, whole.v, mask, alibi_slopes=slopes, **options)


def _check(
    axis: SeqAxis,
    mode: str,
    length: int,
    causal: bool,
    window: int | None,
    slopes: Array | None,
    layout: SequenceLayout,
    implementation: str | None,
) -> None:
    if mode not in get_args(ContextParallel):
        raise ValueError(f"mode {mode!r} is not one of {get_args(ContextParallel)} or None")
    if layout != CONTIGUOUS and (mode != "ring" or window is not None):
        raise ValueError(
            f"the {layout.kind} layout goes with mode='ring' without a window, not with mode={mode!r}, "
            f"window={window}: leave the tokens in order"
        )
    if implementation == "mosaic_gpu" and (mode != "ring" or window is not None):
        raise ValueError(
            f"implementation 'mosaic_gpu' runs rings without a window, not mode={mode!r}, window={window}: "
            "use implementation=None"
        )
    if mode == "ring" and has_reference_ops():
        raise ValueError(
            f"mode 'ring' over {axis.size} devices has first derivatives only, and this is inside reference_ops: "
            "use mode='all_to_all' or 'all_gather' (a config's context_parallel), or a mesh without 'seq'"
        )
    if mode == "ring" and slopes is not None:
        raise ValueError("a ring knows no ALiBi distances: use mode='all_to_all', 'all_gather' or None")
    balanced = mode == "ring" and causal and window is None
    (ZIGZAG if balanced else layout).check(length, axis.size)
    stretch = length // axis.size
    if mode == "ring" and window is not None and window > stretch:
        raise ValueError(
            f"a window of {window} is longer than the {stretch} tokens of a device (T = {length} over "
            f"{axis.size}), and the halo reaches one neighbour: use mode='all_to_all' or 'all_gather', or fewer "
            "devices on the sequence"
        )


def _check_heads(axis: SeqAxis, heads: int, groups: int, slopes: Array | None) -> None:
    others = "'ring' or 'all_gather'" if slopes is None else "'all_gather'"
    if heads % axis.size or groups % axis.size:
        raise ValueError(
            f"mode 'all_to_all' splits heads among the {axis.size} devices of {axis.name!r}: {heads} query heads "
            f"and {groups} key heads must both be multiples of it; use mode={others}"
        )
