"""What `_compat.cudnn_attention` and its gradients promise, on any device: NaN beyond the lengths."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.attention import masks, reference
from pallas_kernels.attention.masks import Mask, prefix


def attention(q: Any, k: Any, v: Any, *, causal: bool, window: Any, scale: float, lengths: Any) -> Any:
    """Output in q's dtype and log-sum-exp."""
    o, lse = reference.attention_with_lse(q, k, v, _mask(causal, window, lengths), scale=scale)
    if lengths is None:
        return o.astype(q.dtype), lse
    counts = prefix(lengths[0], q.shape[1])
    return _only(counts, o).astype(q.dtype), jnp.where(counts[:, None], lse, jnp.nan)


def gradients(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    do: Any,
    *,
    causal: bool,
    window: Any,
    scale: float,
    lengths: Any,
) -> Any:
    """As of a kernel that looks at the queries beyond the length as well."""
    mask = _mask(causal, window, lengths)
    found = reference.gradients_given_lse(q, k, v, o, lse, do, mask, scale=scale)
    if lengths is not None:
        counts = (prefix(lengths[i], x.shape[1]) for i, x in ((0, q), (1, k), (1, v)))
        found = tuple(_only(some, x) for some, x in zip(counts, found, strict=True))
    return tuple(x.astype(like.dtype) for x, like in zip(found, (q, k, v), strict=True))


def _mask(causal: bool, window: Any, lengths: Any) -> Mask:
    mask = masks.band(causal, window)
    return mask if lengths is None else mask & masks.key_lengths(lengths[1])


def _only(counts: Any, x: Any) -> Any:
    return jnp.where(counts[..., None, None], x, jnp.nan)
