"""One vector a row: pooled over what a mask says is there, so that padding, holes and special ids change nothing."""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxblt.layers import named
from jaxblt.parallel.sequence import check_whole_rows

Pooling = Literal["mean", "max", "first", "last"]


def pool(x: Float[Array, "B T D"], there: Bool[Array, "B T"], pooling: Pooling) -> Float[Array, "B D"]:
    """Pool the positions that are there to one fp32 vector a row; zeros for a row without any.

    "mean" and "max" are taken channel by channel; "first" and "last" are what stands at one position.
    """
    check_whole_rows(x, "pooling")
    wide, mask = x.astype(jnp.float32), there[..., None]
    count = jnp.sum(mask, 1, dtype=jnp.float32)
    if pooling == "mean":
        return jnp.sum(jnp.where(mask, wide, 0), 1) / jnp.maximum(count, 1)
    if pooling == "max":
        found = jnp.max(jnp.where(mask, wide, -jnp.inf), 1)
    else:
        place = jnp.arange(there.shape[1], dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(there, place, 0), 1)
        index = last if pooling == "last" else jnp.argmax(there, 1).astype(jnp.int32)
        found = jnp.take_along_axis(wide, index[:, None, None], 1)[:, 0]
    return jnp.where(count > 0, found, 0)


class AttentionPool(nn.Module):
    """Σ_t softmax_t(x_t · q / √D) x_t over the positions that are there, in fp32, with a learned query q."""

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], there: Bool[Array, "B T"]) -> Float[Array, "B D"]:
        check_whole_rows(x, "pooling")
        width = x.shape[-1]
        init: Any = named(nn.initializers.normal(1.0), "embed")
        query = self.param("query", init, (width,), jnp.float32)
        wide = x.astype(jnp.float32)
        scores = jnp.einsum("btd,d->bt", wide, query) / jnp.sqrt(jnp.float32(width))
        lowest = jnp.finfo(jnp.float32).min
        # Give a row of which nothing is there weights of 0, and so a vector of zeros
        weights = jnp.where(there, jax.nn.softmax(jnp.where(there, scores, lowest), -1), 0)
        return jnp.einsum("bt,btd->bd", weights, wide)
