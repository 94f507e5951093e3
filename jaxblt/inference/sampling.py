"""From logits to the next byte."""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxblt.data.vocab import BOE, BOS, PAD, VOCAB_SIZE
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


@flax.struct.dataclass
class SamplingArrays:
    """A `SamplingConfig` a row, as values that a compiled program reads: another setting compiles nothing."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]


def sampling_arrays(configs: Sequence[SamplingConfig]) -> SamplingArrays:
    """The settings of each row, side by side."""
    return SamplingArrays(
        temperature=jnp.asarray([config.temperature for config in configs], jnp.float32),
        top_k=jnp.asarray([config.top_k for config in configs], jnp.int32),
        top_p=jnp.asarray([config.top_p for config in configs], jnp.float32),
    )


def sample(
    sampling: SamplingConfig | SamplingArrays, keys: Key[Array, "B"], logits: Float[Array, "B V"]
) -> Int[Array, "B"]:
    """Draw the id of a byte or EOS a row.

    Never BOE, BOS or PAD, which no document holds after its first byte, nor an id of a larger vocabulary.

    Args:
      sampling: how, for all rows or for each.
      keys: one a row; an id depends on its own row's key, settings and logits only.
      logits: of all ids. A row whose logits are not finite draws an id without meaning, but none of these.
    """
    if isinstance(sampling, SamplingConfig):
        sampling = sampling_arrays([sampling] * len(logits))
    # Draw among the other ids only: a logit of -inf would still be drawn where all logits are -inf or NaN.
    ids = np.arange(min(logits.shape[-1], VOCAB_SIZE), dtype=np.int32)
    allowed = np.setdiff1d(ids, (BOE, BOS, PAD))
    return jnp.asarray(allowed)[_draw(sampling, keys, logits[:, allowed])]


def _draw(sampling: SamplingArrays, keys: Key[Array, "B"], logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    best, greedy = jnp.argmax(logits, -1), sampling.temperature == 0
    # Subtract the maximum first: dividing by a small temperature could overflow to inf.
    scale = jnp.where(greedy, 1, sampling.temperature)[:, None]
    scaled = (logits - jnp.max(logits, -1, keepdims=True)) / scale
    kept = jnp.where(scaled < _floor(sampling, scaled), -jnp.inf, scaled)
    return jnp.where(greedy, best, jax.vmap(jax.random.categorical)(keys, kept))


def _floor(sampling: SamplingArrays, logits: Float[Array, "B V"]) -> Float[Array, "B 1"]:
    """The least logit of each row that top-k, then top-p among what top-k keeps, leave in; -inf where both are off."""
    ordered, ids = -jnp.sort(-logits, axis=-1), logits.shape[-1]
    count = jnp.where(sampling.top_k == 0, ids, jnp.minimum(sampling.top_k, ids))[:, None]
    least = jnp.take_along_axis(ordered, count - 1, -1)
    probability = jax.nn.softmax(jnp.where(ordered < least, -jnp.inf, ordered), -1)
    before = jnp.cumsum(probability, -1) - probability
    top_p = sampling.top_p[:, None]
    nucleus = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
    # A sum of all probabilities rounds to 1 before its last terms: at 1 nothing is to be cut.
    without = jnp.where(sampling.top_k[:, None] == 0, -jnp.inf, least)
    return jnp.where(top_p < 1, jnp.maximum(nucleus, least), without)
