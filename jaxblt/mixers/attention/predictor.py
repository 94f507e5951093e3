"""The loss of a predictor of blocks: how far its shares are from those of dense attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxblt.mixers.attention.pooled import Pooled, Queries
from jaxblt.parallel.sequence import SeqAxis
from pallas_kernels.attention.chosen.select import score_blocks


class Asked(NamedTuple):
    """Queries that are sampled from a row.

    Attributes:
      q, learned: of attention, and of the predictor.
      ids, times: their documents, 0 for none, and places in them.
    """

    q: Float[Array, "B n H K"]
    learned: Float[Array, "B n H K"]
    ids: Int[Array, "B n"]
    times: Int[Array, "B n"]


class Keys(NamedTuple):
    """Keys of tokens, and where the blocks lie among them.

    Attributes:
      k, ids, times: of each token.
      first, last: index of each block's first and last token; they may lie outside of the tokens in hand.
    """

    k: Float[Array, "B T G K"]
    ids: Int[Array, "B T"]
    times: Int[Array, "B T"]
    first: Int[Array, "B M"]
    last: Int[Array, "B M"]


def imitate(
    asked: Asked, keys: Keys, pooled: Pooled, size: int, axis: SeqAxis | None, *, causal: bool
) -> Float[Array, "B n G 2"]:
    """Return KL(dense || predicted) of each sampled query over the blocks that it may choose, and its weight, 0 or 1.

    dense_j is the mass of dense attention on the tokens of block j, summed over the heads of a key head, over that of
    all such blocks. predicted is the mean over these heads of softmax_j(u . w_j / sqrt(K)), of the predictor's queries
    u and mean keys w_j. The idea is SeerAttention's (2410.13276), whose dense_j is a maximum. The gradient reaches u
    and w alone.

    Args:
      asked: a device's own sample.
      keys: of tokens, which `axis` splits: each device sums its own for the queries of all.
      pooled: all blocks.
      size: tokens in a block.
      axis: splits the tokens, or None.
      causal: a query may choose blocks before its own; else all of its document.
    """
    count = asked.ids.shape[1]
    if axis is not None:
        asked = jax.tree.map(lambda x: lax.all_gather(x, axis.name, axis=1, tiled=True), asked)
    queries = Queries(asked.learned, asked.ids, asked.times // size if causal else None)
    seen = queries.places.see(pooled.places)[:, None]
    dense = jnp.where(seen, _masses(*lax.stop_gradient((asked, keys)), axis, causal=causal), 0)
    total = jnp.sum(dense, -1, keepdims=True)
    dense /= jnp.where(total > 0, total, 1)
    scores = jnp.where(seen[:, :, None], score_blocks(asked.learned, pooled.keys), -1e30)
    # Take the mean over heads: a choice adds up their shares
    predicted = jax.nn.logsumexp(jax.nn.log_softmax(scores, -1), 2) - jnp.log(scores.shape[2])
    away = jnp.sum(jnp.where(dense > 0, dense * (jnp.log(jnp.where(dense > 0, dense, 1)) - predicted), 0), -1)
    found = jnp.moveaxis(jnp.stack([away, (total[..., 0] > 0).astype(jnp.float32)], -1), 1, 2)
    if axis is None:
        return found
    return lax.dynamic_slice_in_dim(found, lax.axis_index(axis.name) * count, count, 1)


def _masses(asked: Asked, keys: Keys, axis: SeqAxis | None, *, causal: bool) -> Float[Array, "B G n M"]:
    """Return the mass of dense attention on each block."""
    scores = score_blocks(asked.q, keys.k)
    seen = (asked.ids[:, :, None] == keys.ids[:, None]) & (keys.ids > 0)[:, None]
    if causal:
        seen &= keys.times[:, None] <= asked.times[:, :, None]
    seen = seen[:, None, None]
    top = jnp.max(jnp.where(seen, scores, -1e30), -1, keepdims=True)
    top = top if axis is None else lax.pmax(top, axis.name)
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, -1, keepdims=True)
    total = total if axis is None else lax.psum(total, axis.name)
    shares = jnp.sum(weights / jnp.maximum(total, 1e-30), 2)
    before = jnp.pad(jnp.cumsum(shares, -1), ((0, 0), (0, 0), (0, 0), (1, 0)))

    def until(index: Array) -> Array:
        index = jnp.clip(index, 0, keys.k.shape[1])[:, None, None]
        return jnp.take_along_axis(before, jnp.broadcast_to(index, (*before.shape[:3], index.shape[-1])), -1)

    mass = until(keys.last + 1) - until(keys.first)
    return mass if axis is None else lax.psum(mass, axis.name)
