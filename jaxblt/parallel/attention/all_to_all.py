"""Heads scattered over the devices of a sequence: each gets all tokens of its share of them (2309.14509), and back."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.content import content_first
from jaxblt.parallel.sequence import SeqAxis
from pallas_kernels.attention import attention, masks
from pallas_kernels.attention.masks import Mask


def attend_by_heads(
    axis: SeqAxis,
    q: Float[Array, "B T H K"],
    keys: Keys,
    slopes: Float[Array, "H"] | None,
    mask: Mask,
    options: dict[str, Any],
    *,
    by_length: bool,
) -> Float[Array, "B T H K"]:
    """Exact attention to the keys of all devices, inside an island: one exchange there and one back.

    Args:
      axis: the devices; their number divides the heads of queries and of keys.
      q, keys: of this device's stretch.
      slopes: ALiBi's, of all heads.
      mask: for whole rows, without documents.
      options: for the call of `attention`.
      by_length: segment ids mark content and holes of one document, and holes are sorted behind it.
    """
    ids = keys.segment_ids
    if ids is not None:
        ids = lax.all_gather(ids, axis.name, axis=1, tiled=True)
    # Of every device's heads, those of queries, keys and values in one message.
    sent = [rearrange(x, "b t (n h) k -> b t n h k", n=axis.size) for x in (q, keys.k, keys.v)]
    came = lax.all_to_all(jnp.concatenate(sent, 3), axis.name, 2, 1, tiled=True)[:, :, 0]
    q, k, v = jnp.split(came, np.cumsum([x.shape[3] for x in sent])[:-1], axis=2)
    if by_length and ids is not None:
        content = content_first(ids)
        q, k, v = map(content.sort, (q, k, v))
        o = content.restore(attention(q, k, v, mask & masks.token_lengths(content.lengths), **options))
    else:
        if slopes is not None:
            slopes = slopes.reshape(axis.size, -1)[lax.axis_index(axis.name)]
        o = attention(q, k, v, mask & masks.documents(ids), alibi_slopes=slopes, **options)
    return rearrange(lax.all_to_all(o[:, :, None], axis.name, 1, 2, tiled=True), "b t n h k -> b t (n h) k")
