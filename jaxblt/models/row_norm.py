"""Norms over the tokens of a document, which keep what tells one of its tokens from the others."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import named
from jaxblt.parallel.sequence import check_whole_rows

PART = 256
"""Tokens that are added one after another; of longer sums in fp32 the last digits get lost."""


class RowNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias, in each channel over the tokens of a document.

    A norm of each token makes all tokens alike in size: of an image that is mostly black it makes the black pixels
    as loud as the others. Here they stay as small as they are.

    Computed in fp32, returned in `dtype`. Holes and padding do not count. Source: instance normalisation (Ulyanov et
    al., 1607.08022).

    Attributes:
      dtype: of y.
      epsilon: eps.
      packed: a row may hold several documents. False promises one a row, which saves their sums apart.
    """

    dtype: Any = jnp.float32
    epsilon: float = 1e-6
    packed: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Return the norm.

        Raises:
          ValueError: a `shard_map` has split the rows.
        """
        check_whole_rows(x, "a norm over rows")
        shape = (x.shape[-1],)
        scale = self.param("scale", named(nn.initializers.ones, "norm"), shape, jnp.float32)
        bias = self.param("bias", named(nn.initializers.zeros, "norm"), shape, jnp.float32)
        return _normed(
            x, segment_ids, scale[None, None], bias[None, None], self.epsilon, self.packed, self.dtype
        )


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5, 6))
def _normed(
    x: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"] | None,
    scale: Float[Array, "1 1 D"],
    bias: Float[Array, "1 1 D"],
    epsilon: float,
    packed: bool,
    dtype: Any,
) -> Float[Array, "B T D"]:
    """Return the norm; the backward pass keeps x in its own dtype."""
    # What holes hold may be NaN
    wide = (x if segment_ids is None else jnp.where((segment_ids > 0)[..., None], x, 0)).astype(jnp.float32)
    wide = wide - _mean(wide, segment_ids, packed)
    inverse = jax.lax.rsqrt(_mean(wide * wide, segment_ids, packed) + epsilon)
    return (wide * inverse * scale + bias).astype(dtype)


def _mean(x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None, packed: bool) -> Array:
    """Return the mean over the tokens of each document, at each of its positions."""
    if segment_ids is None:
        return jnp.mean(x, 1, keepdims=True)
    tokens = (segment_ids > 0)[..., None].astype(jnp.float32)
    sums = jnp.concatenate([x * tokens, tokens], -1)
    sums = jax.vmap(_sum_documents)(sums, jnp.abs(segment_ids)) if packed else jnp.sum(sums, 1, keepdims=True)
    return sums[..., :-1] / jnp.maximum(sums[..., -1:], 1)


def _sum_documents(x: Float[Array, "T D"], ids: Int[Array, "T"]) -> Float[Array, "T D"]:
    """Return the sum over its document at each position; documents lie one behind the other."""
    starts = jnp.concatenate([jnp.zeros(1, bool), ids[1:] != ids[:-1]])
    number = jnp.cumsum(starts, dtype=jnp.int32)
    part = jnp.cumsum(starts | (jnp.arange(len(ids)) % PART == 0), dtype=jnp.int32) - 1
    add = partial(jax.ops.segment_sum, num_segments=len(ids), indices_are_sorted=True)
    # Parts behind the last one are empty; let them be of its document, for indices that are sorted
    document = jnp.full(len(ids), number[-1]).at[part].set(number, indices_are_sorted=True)
    return add(add(x, part), document)[number]
