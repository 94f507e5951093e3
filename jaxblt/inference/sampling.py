"""From logits to the next byte."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxblt.data.vocab import BOE, BOS, PAD
from jaxblt.validation import check_bounds, check_fields

SMALLEST, LARGEST = 1e-6, 1e6
"""Bounds of temperature and top_p within which fp32 neither rounds them to 0 nor overflows."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a byte is drawn.

    Attributes:
      temperature: logits are divided by it, from 1e-6 to 1e6; 0 takes the most probable byte.
      top_k: keep the k most probable bytes; 0 keeps all.
      top_p: keep the fewest bytes whose probabilities sum to p (Holtzman et al., 1904.09751), from 1e-6 to 1.

    Raises:
      ValueError: a value lies outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature != 0:
            why = ", or 0 to take the most probable byte"
            check_bounds(self, "temperature", least=SMALLEST, most=LARGEST, why=why)
        check_bounds(self, "top_k", least=0, why=": 0 keeps all bytes")
        check_bounds(self, "top_p", least=SMALLEST, most=1, why=": 1 keeps all bytes")


def sample(config: SamplingConfig, keys: Key[Array, "B"], logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Draw one id a row, never BOE, BOS or PAD, which no document holds after its first byte.

    Args:
      config: how.
      keys: one a row; an id depends on its own row's key and logits only.
      logits: of all ids. A row whose logits are not finite draws an id without meaning, but none of the three.
    """
    # Draw among the other ids only: a logit of -inf would still be drawn where all logits are -inf or NaN.
    allowed = np.setdiff1d(np.arange(logits.shape[-1]), (BOE, BOS, PAD)).astype(np.int32)
    return jnp.asarray(allowed)[_draw(config, keys, logits[:, allowed])]


def _draw(config: SamplingConfig, keys: Key[Array, "B"], logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    if config.temperature == 0:
        return jnp.argmax(logits, -1)
    # Subtract the maximum first: dividing by a small temperature could overflow to inf.
    logits = (logits - jnp.max(logits, -1, keepdims=True)) / config.temperature
    if config.top_k:
        floor = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    if config.top_p < 1:
        logits = _nucleus(logits, config.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits)


def _nucleus(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B V"]:
    ordered = -jnp.sort(-logits, axis=-1)
    probability = jax.nn.softmax(ordered, -1)
    before = jnp.cumsum(probability, -1) - probability
    floor = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits < floor, -jnp.inf, logits)
