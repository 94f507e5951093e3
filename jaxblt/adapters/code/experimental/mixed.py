"""Mixtures of codes that come at different rates.

They stand in an experimental room because they gain nothing: in no measurement is a mixture ahead of its best level.
"""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.levels import Level, is_known, levels_of
from jaxblt.side_outputs import sow_loss, sow_metric
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Codes of several levels, sum of w_l c^l with weights that sum to 1; each level has a network of its own.

    A level without a code yet counts with the fallback. The weights are

        gate      a softmax of a product of what the finest level reads; each level has a price
        length    1 for one level, by steps of the document so far: the first below at[0], the next below at[1], ...
        entropy   likewise by the entropy of softmax(f) of the first level, as a share of log E; 1 where it has no code

    Without the level "token" weights stay as they are within a chunk, except where the prefix ends.

    Attributes:
      levels: the coarsest first.
      by: what decides the weights.
      at: rising thresholds between the levels, one fewer than there are levels; of "length" and "entropy".
      prices: of the levels for a "gate", which training pays for each at the mean of its weight; () for none.
    """

    levels: tuple[Level, ...] = ("prefix", "chunk", "token")
    by: Literal["gate", "length", "entropy"] = "gate"
    at: tuple[float, ...] = ()
    prices: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "prices", least=0)
        check_bounds(self, "at", above=0)
        order = ("prefix", "chunk", "token")
        if len(self.levels) < 2 or list(self.levels) != [level for level in order if level in self.levels]:
            raise ValueError(
                f"Mixed.levels must name two or three of {order} in this order, got {self.levels}"
            )
        wanted = 0 if self.by == "gate" else len(self.levels) - 1
        if len(self.at) != wanted or any(low >= high for low, high in pairwise(self.at)):
            raise ValueError(
                f"Mixed.at must be {wanted} rising thresholds for by={self.by!r} and {len(self.levels)} levels, got "
                f"{self.at}"
            )
        if self.by == "entropy" and self.at[-1] >= 1:
            raise ValueError(
                f"Mixed.at holds shares of the largest entropy, which are below 1, got {self.at}"
            )
        if self.prices and (self.by != "gate" or len(self.prices) != len(self.levels)):
            raise ValueError(
                f"Mixed.prices = {self.prices} are paid by a gate, one for each of {self.levels}: got by={self.by!r}"
            )


def level_weights(
    config: Any,
    scores: Sequence[Float[Array, "B T E"]],
    gate: Float[Array, "B T L"] | None,
    time: Int[Array, "B T"],
) -> Float[Array, "B T L"]:
    """Return the weight of each level at each token.

    Args:
      config: the `RouterConfig`, whose level is `Mixed`.
      scores: f of each level.
      gate: what a gate makes its softmax of.
      time: of each token in its document.
    """
    mixed: Mixed = config.level
    if gate is not None:
        return jax.nn.softmax(gate, -1)
    place = _place(config, scores[0], time)
    index = sum((place >= jnp.float32(edge)).astype(jnp.int32) for edge in mixed.at)
    return jax.nn.one_hot(index, len(mixed.levels), dtype=jnp.float32)


def sow_shares(
    router: nn.Module, config: Any, weights: Float[Array, "B T L"], content: Bool[Array, "B T"] | None
) -> None:
    """Sow the mean weight of each level over tokens as metric "level_shares", and what training pays for them."""
    tokens = jnp.ones(weights.shape[:2], jnp.float32) if content is None else content.astype(jnp.float32)
    shares = jnp.einsum("btl,bt->l", weights, tokens) / jnp.maximum(jnp.sum(tokens), 1)
    sow_metric(router, "level_shares", shares)
    if config.level.prices:
        sow_loss(router, "level_price", jnp.sum(shares * jnp.asarray(config.level.prices, jnp.float32)))


def _place(config: Any, scores: Float[Array, "B T E"], time: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the numbers that thresholds are compared with."""
    levels = levels_of(config)
    if config.level.by == "length":
        steps = time if "token" in levels else time // config.chunk * config.chunk
        return steps.astype(jnp.float32)
    entropy = jnp.sum(jax.scipy.special.entr(jax.nn.softmax(scores, -1)), -1)
    share = entropy / jnp.log(jnp.float32(scores.shape[-1]))
    return jnp.where(is_known(config, levels[0], time), share, 1.0)
