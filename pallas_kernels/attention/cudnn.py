"""Attention by cuDNN's fused kernels, through `jax.nn.dot_product_attention`.

cuDNN masks causally, by a causal window and by valid prefixes itself. Other masks go to it as an array of
T x S entries, which is done only while that array is small; above that, segments of T = S tokens go to it as
documents by their places (`cudnn_packed`).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import _compat
from pallas_kernels._dispatch import Device
from pallas_kernels.attention import cudnn_packed
from pallas_kernels.attention.arguments import zero_where_not
from pallas_kernels.attention.masks import EMPTY_LSE, Mask, prefix

LARGEST_MASK = 4096 * 4096
"""Entries T * S of a mask given as an array."""


def why_not(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    mask: Mask,
    *,
    alibi_slopes: Any = None,
    scale: Any = None,
    score: Any = None,
) -> str | None:
    """Return None if cuDNN can run this on `device`, else why not."""
    if device.platform != "gpu" or device.capability is None:
        return f"it needs an NVIDIA GPU, this is {device.platform}"
    if device.capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {device.capability[0]}.{device.capability[1]}"
    if mask.rule is not None or score is not None:
        return "it visits all blocks whatever a rule says, and takes no function of scores"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16 alone, not {q.dtype}"
    widest = 256 if device.capability >= (9, 0) else 128
    if q.shape[-1] % 8 or q.shape[-1] > widest:
        return f"the size of a head must be a multiple of 8 and at most {widest}, not {q.shape[-1]}"
    cells = q.shape[1] * k.shape[1]
    if _native(mask, alibi_slopes) or cells <= LARGEST_MASK:
        return None
    reason = cudnn_packed.why_not(device, q, k, mask, alibi_slopes=alibi_slopes)
    if reason is None:
        return None
    return f"as an array this mask is too large at T * S = {cells} > {LARGEST_MASK}, and {reason}"


def _native(mask: Mask, alibi_slopes: Any) -> bool:
    return (
        mask.interval.is_plain and alibi_slopes is None and mask.positions is None and mask.segments is None
    )


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T H K"]:
    """Return the output, in q's dtype; scores and softmax are fp32 in the kernel."""
    queries, keys = q.shape[1], k.shape[1]
    if not _native(mask, alibi_slopes) and queries * keys > LARGEST_MASK:
        return cudnn_packed.attention(q, k, v, mask, scale=scale)
    # The backward kernel takes even lengths alone.
    q, k, v = _even(q, 1), _even(k, 1), _even(v, 1)
    if _native(mask, alibi_slopes):
        o = _masked_by_kernel(q, k, v, mask, scale, queries, keys)
    else:
        o = _masked_by_array(q, k, v, mask, alibi_slopes, scale, queries, keys)
    return o[:, :queries]


def _masked_by_kernel(
    q: Array, k: Array, v: Array, mask: Mask, scale: float | None, queries: int, keys: int
) -> Array:
    interval, lengths = mask.interval, _lengths(mask, q.shape[0], queries, keys)
    if lengths is None and k.shape[1] > keys and not interval.causal:
        lengths = tuple(jnp.full(q.shape[:1], size, jnp.int32) for size in (queries, keys))
    # The kernel is not asked for an empty row: the caller zeroes what its one query finds.
    q_lengths, kv_lengths = (None, None) if lengths is None else (jnp.maximum(x, 1) for x in lengths)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=interval.causal,
        query_seq_lengths=q_lengths,
        key_value_seq_lengths=kv_lengths,
        local_window_size=None if interval.before is None else (interval.before, 0),
        implementation="cudnn",
    )


def _masked_by_array(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    slopes: Float[Array, "H"] | None,
    scale: float | None,
    queries: int,
    keys: int,
) -> Array:
    dense = mask.dense(queries, keys)
    seen = _even(_even(dense, 1), 2)
    bias = None
    if slopes is not None:
        # Keep the bias finite where a key is hidden: the mask is a number that JAX adds to it.
        distance = jnp.where(dense, mask.distances(queries, keys), 0)
        bias = -slopes.astype(jnp.float32)[None, :, None, None] * distance.astype(jnp.float32)[:, None]
        bias = _even(_even(bias.astype(q.dtype), 2), 3)
    o = jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=seen[:, None], scale=scale, implementation="cudnn"
    )
    return _zero_empty(o, seen)


def why_not_partial(device: Device, q: Any, k: Any, v: Any, mask: Mask, *, scale: Any = None) -> str | None:
    """Return None if cuDNN can run partial attention with its log-sum-exp on `device`, else why not."""
    documents = _own_documents(mask)
    if not (documents or _native(mask, None)):
        return "for partial attention it has causal masks, causal windows and lengths, and documents of the same tokens"
    if documents and (reason := cudnn_packed.why_not(device, q, k, mask)) is not None:
        return reason
    by_length = mask.q_lengths is not None or mask.kv_lengths is not None
    if k.shape[1] % 2 and not (mask.interval.causal or by_length or documents):
        return f"it takes even lengths alone, not {k.shape[1]} keys"
    return why_not(device, q, k, v, replace(mask, segments=None), scale=scale)


def _own_documents(mask: Mask) -> bool:
    alone = mask.positions is None and mask.q_lengths is None and mask.kv_lengths is None
    return alone and mask.same_tokens


def attention_with_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Return the output in q's dtype and fp32 log-sum-exp."""
    if mask.segments is not None:
        return cudnn_packed.attention_with_lse(q, k, v, mask, scale=scale)
    queries, lengths = q.shape[1], _lengths(mask, q.shape[0], q.shape[1], k.shape[1])
    options = _part_options(q, mask, scale, lengths)
    # One key more comes last: no query before it sees it, as `why_not_partial` made sure of.
    o, lse = _compat.cudnn_attention(_even(q, 1), _even(k, 1), _even(v, 1), **options)
    o, lse = o[:, :queries], lse[:, :, :queries]
    if lengths is None:
        return o, lse
    sees, _ = _meeting(lengths, q, k)
    return zero_where_not(sees, o), jnp.where(sees[:, None], lse, EMPTY_LSE)


def gradients_given_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    o: Float[Array, "B T H K"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Return what these keys add to dq, and dk and dv, in the dtypes of q, k and v."""
    if mask.segments is not None:
        return cudnn_packed.gradients_given_lse(q, k, v, o, lse, do, mask, scale=scale)
    queries, keys = q.shape[1], k.shape[1]
    lengths = _lengths(mask, q.shape[0], queries, keys)
    options = _part_options(q, mask, scale, lengths)
    sees, seen = (None, None) if lengths is None else _meeting(lengths, q, k)
    if sees is not None:
        # exp(score - lse) is 0 for the other queries, also if the kernel looks at them.
        lse = jnp.where(sees[:, None], lse, -EMPTY_LSE)
    q, k, v, o, do = (_even(x, 1) for x in (q, k, v, o.astype(q.dtype), do.astype(q.dtype)))
    dq, dk, dv = _compat.cudnn_attention_gradients(q, k, v, o, _even(lse, 2), do, **options)
    return (
        zero_where_not(sees, dq[:, :queries]),
        zero_where_not(seen, dk[:, :keys]),
        zero_where_not(seen, dv[:, :keys]),
    )


def _part_options(
    q: Array, mask: Mask, scale: float | None, lengths: tuple[Array, Array] | None
) -> dict[str, Any]:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if lengths is not None:
        # The kernel is not asked for an empty row, but for one query and key that `_meeting` hides.
        lengths = jnp.maximum(lengths[0], 1), jnp.maximum(lengths[1], 1)
    interval = mask.interval
    return {"causal": interval.causal, "window": interval.window, "scale": scale, "lengths": lengths}


def _lengths(
    mask: Mask, rows: int, queries: int, keys: int
) -> tuple[Int[Array, "B"], Int[Array, "B"]] | None:
    """Return how many queries and keys of each row count; None if all do."""
    if mask.q_lengths is None and mask.kv_lengths is None:
        return None

    def of(lengths: Array | None, size: int) -> Array:
        if lengths is None:
            return jnp.full(rows, size, jnp.int32)
        return jnp.clip(lengths, 0, size).astype(jnp.int32)

    return of(mask.q_lengths, queries), of(mask.kv_lengths, keys)


def _meeting(
    lengths: tuple[Array, Array], q: Array, k: Array
) -> tuple[Bool[Array, "B T"], Bool[Array, "B S"]]:
    """Return the queries that count and have a key that does, and such keys."""
    both = jnp.minimum(*lengths)[:, None] > 0
    return both & prefix(lengths[0], q.shape[1]), both & prefix(lengths[1], k.shape[1])


def _zero_empty(o: Float[Array, "B T H K"], seen: Bool[Array, "#B T S"]) -> Float[Array, "B T H K"]:
    """Zero the rows that see no key, where the kernel averages over all keys."""
    return jnp.where(jnp.any(seen, -1)[:, :, None, None], o, jnp.zeros((), o.dtype))


def _even(x: Array, axis: int) -> Array:
    """Return x with one zero (or False) more along `axis` if its length is odd."""
    if x.shape[axis] % 2 == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, 1)
    return jnp.pad(x, widths)
