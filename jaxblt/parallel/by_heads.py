"""Heads scattered over the devices of a sequence: each gets all tokens of its share of them (2309.14509), and back."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxblt.parallel.content import content_first
from jaxblt.parallel.pieces import Keys
from jaxblt.parallel.sequence import SeqAxis
from pallas_kernels.attention import attention

TURNS = 2
"""Into which a device's heads are cut, so that one turn's exchange goes on beside the attention of another."""

LONG = 4096
"""Tokens a device from which that is done; below, an exchange is short and its start is what takes time."""


def attend_by_heads(
    axis: SeqAxis,
    q: Float[Array, "B T H K"],
    keys: Keys,
    slopes: Float[Array, "H"] | None,
    options: dict[str, Any],
    *,
    by_length: bool,
) -> Float[Array, "B T H K"]:
    """Exact attention to the keys of all devices, inside an island; two exchanges a turn.

    Args:
      axis: the devices; their number divides the heads of queries and of keys.
      q, keys: of this device's stretch.
      slopes: ALiBi's, of all heads.
      options: for every call of `attention`.
      by_length: segment ids mark content and holes of one document, and holes are sorted behind it.
    """
    ids = keys.segment_ids
    if ids is not None:
        ids = lax.all_gather(ids, axis.name, axis=1, tiled=True)
    content = content_first(ids) if by_length and ids is not None else None
    turns = TURNS if q.shape[1] >= LONG and _divide(axis.size * TURNS, q, keys.k) else 1
    by_device = [x.reshape(*x.shape[:2], axis.size, turns, -1, x.shape[-1]) for x in (q, keys.k, keys.v)]
    if slopes is not None:
        slopes = slopes.reshape(axis.size, turns, -1)[lax.axis_index(axis.name)]
    found = []
    for turn in range(turns):
        sent = [x[:, :, :, turn] for x in by_device]
        came = lax.all_to_all(jnp.concatenate(sent, 3), axis.name, 2, 1, tiled=True)[:, :, 0]
        heads = jnp.split(came, np.cumsum([x.shape[3] for x in sent])[:-1], axis=2)
        if content is None:
            given = {"q_segment_ids": ids, "kv_segment_ids": ids}
            given["alibi_slopes"] = None if slopes is None else slopes[turn]
            o = attention(*heads, **given, **options)
        else:
            o = attention(*map(content.sort, heads), lengths=content.lengths, **options)
            o = content.restore(o)
        found.append(lax.all_to_all(o[:, :, None], axis.name, 1, 2, tiled=True))
    return jnp.stack(found, 3).reshape(q.shape)


def _divide(count: int, *arrays: Array) -> bool:
    return all(x.shape[2] % count == 0 for x in arrays)
