"""Attention within the documents of packed rows by cuDNN, which visits no pair of tokens of two documents.

Segment ids become starts and lengths on the device (`documents`); each class of sizes is one call of the kernel.
Rows whose documents are not runs of rising ids, as with holes inside, and rows of so many short documents that there
is no room for them are found out on the device too, and the whole call runs on XLA then.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import Device
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.attention import cudnn_ragged, masks, xla
from pallas_kernels.attention.documents import MULTIPLE, Layout, find_documents, longest_by_class
from pallas_kernels.attention.masks import EMPTY_LSE, Interval, Mask, prefix

LARGEST_SCRATCH = 2**34
"""Bytes that the backward kernel may ask for besides its arrays; larger calls are left to others. Elements of q are few
enough then for the documents' places, which the kernel gets in int32."""


@dataclass(frozen=True)
class _Options:
    interval: Interval
    scale: float

    def of_class(self, longest: int) -> dict[str, Any]:
        interval = self.interval
        return {
            "causal": interval.causal,
            "window": interval.window,
            "scale": self.scale,
            "longest": longest,
        }


class _Saved(NamedTuple):
    """Arrays that the backward pass needs; `by_places` says which kernel ran."""

    q: Array
    k: Array
    v: Array
    q_ids: Array
    kv_ids: Array
    o: Array
    lse: Array
    layout: Layout
    by_places: Array


def why_not(device: Device, q: Any, k: Any, mask: Mask, *, alibi_slopes: Any = None) -> str | None:
    """Return None if this form can run what cuDNN can run on `device`, else why not."""
    if device.capability is None or device.capability < (9, 0):
        return "documents by their places need compute capability 9.0"
    if mask.segments is None or q.shape[1] != k.shape[1]:
        return "it finds documents by segment ids of T = S tokens"
    if mask.positions is not None or alibi_slopes is not None:
        return "documents by their places have no positions or ALiBi"
    if not mask.interval.is_plain:
        return "documents by their places have no two-sided windows and no other intervals"
    elements = q.size + q.size // q.shape[1] * (-q.shape[1] % MULTIPLE)
    scratch = elements * (32 if q.shape[2] == k.shape[2] else 64)
    if scratch > LARGEST_SCRATCH:
        return f"the backward kernel's scratch would be {scratch} > {LARGEST_SCRATCH} bytes"
    return None


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> Float[Array, "B T H K"]:
    """Return the output in q's dtype, zero where no token is; scores and softmax are fp32 in the kernel.

    The backward kernel's scratch is 32 bytes an element of q, 64 if G < H.
    """
    return _packed(_options(q, mask, scale), *_operands(mask, q, k, v))[:, : q.shape[1]]


def attention_with_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Return `attention` without a derivative, and its fp32 log-sum-exp, EMPTY_LSE where no token is."""
    _, saved = _forward(_options(q, mask, scale), *_operands(mask, q, k, v))
    return saved.o[:, : q.shape[1]], saved.lse[:, :, : q.shape[1]]


def gradients_given_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    o: Float[Array, "B T H K"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Return dq, dk and dv, zero where no token is, from an output and a log-sum-exp over these keys and others."""
    tokens, sums = q.shape[1], lse.swapaxes(1, 2)
    options, given = _options(q, mask, scale), (o.astype(q.dtype), do.astype(q.dtype), sums)
    q, k, v, o, do, sums, q_ids, kv_ids = _operands(mask, q, k, v, *given)
    saved = _Saved(q, k, v, q_ids, kv_ids, o, sums.swapaxes(1, 2), *_find(q_ids, kv_ids))
    dq, dk, dv = _backward(options, saved, do)[:3]
    return dq[:, :tokens], dk[:, :tokens], dv[:, :tokens]


def _options(q: Array, mask: Mask, scale: float | None) -> _Options:
    return _Options(mask.interval, q.shape[-1] ** -0.5 if scale is None else float(scale))


def _operands(mask: Mask, *arrays: Array) -> tuple[Array, ...]:
    """Return the arrays and the segment ids of queries and keys, of a length that classes divide.

    Raises:
      ValueError: the mask has no documents.
    """
    if mask.segments is None:
        raise ValueError("documents are found by segment ids: pass a mask of masks.documents(segment_ids)")
    given = (mask.q_lengths, mask.segments.q), (mask.kv_lengths, mask.segments.of_keys)
    ids = (ids if n is None else jnp.where(prefix(n, ids.shape[1]), ids, 0) for n, ids in given)
    return vary_alike(*(_whole(x) for x in (*arrays, *ids)))


def _whole(x: Array) -> Array:
    missing = -x.shape[1] % MULTIPLE
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x


def _run(options: _Options, q: Array, k: Array, v: Array, q_ids: Array, kv_ids: Array) -> Array:
    return _forward(options, q, k, v, q_ids, kv_ids)[0]


def _find(q_ids: Array, kv_ids: Array) -> tuple[Layout, Array]:
    layout = find_documents(q_ids)
    return layout, layout.complete & jnp.all(q_ids == kv_ids)


def _forward(
    options: _Options, q: Array, k: Array, v: Array, q_ids: Array, kv_ids: Array
) -> tuple[Array, _Saved]:
    layout, by_places = _find(q_ids, kv_ids)

    def by_cudnn(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        o, lse = jnp.zeros_like(q), jnp.full(q.shape[:3], EMPTY_LSE, jnp.float32)
        for number, longest in enumerate(longest_by_class(q.shape[1])):
            found, sums = cudnn_ragged.attention(
                q, k, v, layout.documents[number], **options.of_class(longest)
            )
            o = _of_class(layout, number, found, o)
            lse = _of_class(layout, number, sums[layout.slot, :, layout.offset], lse)
        return o, lse.swapaxes(1, 2)

    def by_xla(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        mask = Mask(options.interval) & masks.documents(q_ids, kv_ids)
        o, lse = xla.attention_with_lse(q, k, v, mask, scale=options.scale)
        return o.astype(q.dtype), lse

    o, lse = lax.cond(by_places, by_cudnn, by_xla, q, k, v)
    return o, _Saved(q, k, v, q_ids, kv_ids, o, lse, layout, by_places)


def _backward(options: _Options, saved: _Saved, do: Array) -> tuple[Any, ...]:
    q, k, v, q_ids, kv_ids, o, lse, layout, by_places = saved

    def by_cudnn(q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array) -> tuple[Array, ...]:
        sums = tuple(jnp.zeros_like(x) for x in (q, k, v))
        flat = lse.swapaxes(1, 2).reshape(-1, lse.shape[1])
        for number, longest in enumerate(longest_by_class(q.shape[1])):
            documents = layout.documents[number]
            place = jnp.arange(longest, dtype=jnp.int32)[None]
            inside = place < documents.lengths[:, None]
            rows = jnp.take(flat, documents.starts[:, None] + place, axis=0, mode="clip")
            rows = jnp.where(inside[..., None], rows, 0.0).swapaxes(1, 2)
            found = cudnn_ragged.gradients(q, k, v, o, rows, do, documents, **options.of_class(longest))
            sums = tuple(_of_class(layout, number, *pair) for pair in zip(found, sums, strict=True))
        return sums

    def by_xla(q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array) -> tuple[Array, ...]:
        mask = Mask(options.interval) & masks.documents(q_ids, kv_ids)
        gradients = xla.gradients_given_lse(q, k, v, o, lse, do, mask, scale=options.scale)
        return tuple(x.astype(like.dtype) for x, like in zip(gradients, (q, k, v), strict=True))

    return (*lax.cond(by_places, by_cudnn, by_xla, q, k, v, o, lse, do), None, None)


def _of_class(layout: Layout, number: int, found: Array, others: Array) -> Array:
    mine = layout.size_class == number
    return jnp.where(jnp.reshape(mine, mine.shape + (1,) * (found.ndim - 2)), found, others)


_packed = OwnGradient(_run, nondiff_argnums=(0,))
_packed.defvjp(_forward, _backward)
