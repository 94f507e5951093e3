"""From logits to the next byte."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.vocab import BOE, BOS, PAD
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a byte is drawn.

    Attributes:
      temperature: logits are divided by it; 0 takes the most probable byte.
      top_k: keep the k most probable bytes; 0 keeps all.
      top_p: keep the fewest bytes whose probabilities sum to p (Holtzman et al., 1904.09751).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "temperature", least=0, why=": 0 takes the most probable byte")
        check_bounds(self, "top_k", least=0, why=": 0 keeps all bytes")
        check_bounds(self, "top_p", above=0, most=1, why=": 1 keeps all bytes")


def sample(config: SamplingConfig, key: Array, logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """One id a row; never BOE, BOS or PAD, which no document holds after its first byte."""
    banned = jnp.zeros(logits.shape[-1], bool).at[jnp.array([BOE, BOS, PAD])].set(True)
    logits = jnp.where(banned[None], -jnp.inf, logits)
    if config.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / config.temperature
    if config.top_k:
        floor = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    if config.top_p < 1:
        logits = _nucleus(logits, config.top_p)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def _nucleus(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B V"]:
    ordered = -jnp.sort(-logits, axis=-1)
    probability = jax.nn.softmax(ordered, -1)
    before = jnp.cumsum(probability, -1) - probability
    floor = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits < floor, -jnp.inf, logits)
