"""A read: attention pooling of a document's first steps."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.code.levels import Level
from jaxblt.adapters.code.pools import ChunkwiseSums, Smooth
from jaxblt.adapters.code.reads import Features, Read, RouterInput
from jaxblt.layers import named
from jaxblt.mixers.driver.sequence import check_kind
from jaxblt.validation import check_bounds, check_fields

MOST_SCORE = 10.0
"""Bound of the scores of attention pooling: their exponentials are added up without a running maximum."""


@flax.struct.dataclass
class PrefixState:
    """Weighted sums of a document's first `steps`; the last column sums the weights."""

    sums: Float[Array, "B F"]
    steps: int = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Prefix(Read):
    """Attention pooling of the first steps of a document, 0 before they are complete.

    p = sum_t w_t h_t / sum_t w_t over tokens t < `steps`, with w_t = exp(s tanh(q . h_t / (s sqrt D))), s = 10 and a
    learned query q.

    Attributes:
      steps: P, of the document's own time.
    """

    steps: int = 128
    name: ClassVar[str] = "prefix"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "steps", least=1)

    def zero(self, config: Any, batch_size: int, dim: int) -> PrefixState:
        """Return sums of nothing."""
        return PrefixState(jnp.zeros((batch_size, dim + 1), jnp.float32), self.steps)

    def width(self, config: Any, dim: int, level: Level) -> int:
        """Return the width of the rows."""
        return dim

    def hear(self, router: nn.Module, call: RouterInput, state: PrefixState | None) -> tuple[Features, Any]:
        """Return p from the prefix's end on: at a chunk, from the first chunk whose code may wait for it."""
        check_kind(PrefixState, state, steps=self.steps)
        weights = self._weights(router, call)
        weighted = call.bare * weights
        if call.aligned:
            # Keep a NaN behind the prefix out of the sum of the chunk in which the prefix ends
            weighted = jnp.where(weights > 0, weighted, 0.0)
        streams = (
            jnp.where(call.time == 0, 0.0, 1.0)[..., None],
            jnp.concatenate([weighted, weights], -1),
        )
        core = ChunkwiseSums(call.config.chunk) if call.aligned else Smooth()
        sums, after = call.rows.run(core, streams, None if state is None else state.sums)
        total = jnp.maximum(sums[..., -1:], jnp.exp(jnp.float32(-2 * MOST_SCORE)))
        pooled = sums[..., :-1] / total * call.scale
        known_to_chunk = (call.chunk - call.config.lag + 1) * call.config.chunk >= self.steps
        chunk = jnp.where(known_to_chunk[..., None], pooled, 0.0)
        token = jnp.where((call.time >= self.steps)[..., None], pooled, 0.0)
        features: Features = {"prefix": token, "chunk": chunk, "token": token}
        return features, None if after is None else PrefixState(after, self.steps)

    def _weights(self, router: nn.Module, call: RouterInput) -> Float[Array, "B T 1"]:
        """Return the weight of each token, 0 at holes and behind the prefix."""
        dim = call.bare.shape[-1]
        query = router.param("query", named(nn.initializers.normal(1.0), "norm"), (dim,), jnp.float32)
        # Sum over x, not over the normed x: XLA makes this sum and that of x^2 in one kernel
        weight = call.scale[0, 0] * query / jnp.float32(dim**0.5)
        score = jnp.einsum("btd,d->bt", call.rows.x, weight)[..., None] * call.inverse_rms
        counts = ((call.time < self.steps) & call.content)[..., None].astype(jnp.float32)
        return counts * jnp.exp(MOST_SCORE * jnp.tanh(score / MOST_SCORE))
