"""The number of slots that a token may use: a soft causal mask over them, from what the document held so far."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.layers import Linear
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import Rows
from pallas_kernels.linear_scan import decayed, linear_scan

LEAST = 4
"""Slots that every token has."""
WIDTH = 16
"""Numbers of a token whose mean says how hard its document is."""


@flax.struct.dataclass
class RunningSum:
    """Core of sums over the document's tokens so far, in fp32; streams are [B, T, E]."""

    def zero(self, streams: Float[Array, "B T E"]) -> Float[Array, "B E"]:
        """Return a sum of no tokens."""
        return jnp.zeros_like(streams[:, 0], jnp.float32)

    def run(
        self, streams: Float[Array, "B T E"], marks: Marks, carry: Float[Array, "B E"] | None
    ) -> tuple[Float[Array, "B T E"], tuple[Float[Array, "B E"], Float[Array, "B E"]]]:
        """Return sums, the token's own included, and what the stretch does to a carry."""
        added = marks.inputs(streams.astype(jnp.float32))
        kept = marks.resets(jnp.ones_like(added))
        sums = linear_scan(kept, added, initial=carry)
        return sums, (jnp.zeros_like(sums[:, 0]) if carry is not None else jnp.prod(kept, 1), sums[:, -1])

    def join(self, carry: Float[Array, "B E"], summary: tuple[Array, Array]) -> Float[Array, "B E"]:
        """Return the sum behind the stretch."""
        kept, left = summary
        return decayed(kept, carry) + left


class SlotCount(nn.Module):
    """c_t = sigmoid(w . silu(mean_{i <= t} x_i W) + b), n_t = 4 + c_t (S - 4), mask_ts = f(clip(n_t - s, 0, 1)).

    Slots s <= n_t - 1 are there and slots s >= n_t are not. The one in between is there in part, through which c has a
    gradient; f(u) = 3 u^2 - 2 u^3 spares that gradient jumps.
    """

    slots: int
    dtype: Any

    @nn.compact
    def __call__(
        self, rows: Rows, carry: Float[Array, "B E"] | None
    ) -> tuple[Float[Array, "B T S"], Float[Array, "B T"], Float[Array, "B E"] | None]:
        """Return the mask, c, and the sums behind the call."""
        u = Linear("btd,de->bte", {"e": WIDTH}, ("embed", "features"), self.dtype, name="in")(rows.x)
        counted = jnp.concatenate([u.astype(jnp.float32), jnp.ones((*u.shape[:2], 1), jnp.float32)], -1)
        sums, after = rows.run(RunningSum(), counted, carry)
        mean = jax.nn.silu(sums[..., :-1] / jnp.maximum(sums[..., -1:], 1))
        zeros = nn.initializers.zeros
        c = Linear("bte,eo->bto", {"o": 1}, ("features", None), jnp.float32, bias=zeros, name="out")(mean)
        c = jax.nn.sigmoid(c[..., 0])
        count = LEAST + c * (self.slots - LEAST)
        part = jnp.clip(count[..., None] - jnp.arange(self.slots, dtype=jnp.float32)[None, None], 0, 1)
        return part * part * (3 - 2 * part), c, after


def start_count(batch_size: int) -> Float[Array, "B E"]:
    """Return the sums before the first token."""
    return jnp.zeros((batch_size, WIDTH + 1), jnp.float32)
