"""How often a router gives a code, and mixtures of codes that come at different rates."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.side_outputs import sow_loss, sow_metric
from jaxblt.validation import check_bounds, check_fields

Level = Literal["prefix", "chunk", "token"]


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


def levels_of(config: Any) -> tuple[Level, ...]:
    """Return the levels of a `RouterConfig`, the coarsest first."""
    return config.level.levels if isinstance(config.level, Mixed) else (config.level,)


def first_step(config: Any, level: Level) -> int:
    """Return the step of a document at which a level has its first code."""
    return {"prefix": config.prefix, "chunk": config.lag * config.chunk, "token": 0}[level]


def is_known(config: Any, level: Level, time: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return where a level has a code."""
    return jnp.ones(time.shape, bool) if level == "token" else time >= first_step(config, level)


class Places(NamedTuple):
    """Tokens at which f of a level is computed; the tokens around each share it.

    Attributes:
      first: of a row.
      step: from one to the next.
    """

    first: int
    step: int

    def taken(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B N ..."]:
        """Return x at these tokens."""
        return x[:, self.first :: self.step]

    def spread(self, x: Float[Array, "B N F"], length: int) -> Float[Array, "B T F"]:
        """Return values that were computed at these tokens, at each of a row's."""
        return x if self.step == 1 else jnp.repeat(x, self.step, 1)[:, :length]


EVERY = Places(0, 1)
"""Each token."""


def places_of(
    config: Any, level: Level, length: int, segment_ids: Int[Array, "B T"] | None, *, whole: bool
) -> Places | None:
    """Return where f of a level is computed, a chunk or a document once; None where only a token's time tells.

    Args:
      config: the `RouterConfig`.
      level: of f.
      length: of the rows.
      segment_ids: of their documents.
      whole: whether rows begin where documents do; else they begin anywhere in a chunk.
    """
    if level == "token":
        return EVERY
    if level == "prefix" and whole and _are_single(config, segment_ids):
        return Places(min(config.prefix, length - 1), length)
    if level == "chunk" and are_aligned(config, segment_ids, whole=whole):
        return Places(0, config.chunk)
    return None


def are_aligned(config: Any, segment_ids: Int[Array, "B T"] | None, *, whole: bool) -> bool:
    """Return whether chunks of documents are those of their row; arguments are as in `places_of`."""
    return whole and (_are_single(config, segment_ids) or config.segment_alignment % config.chunk == 0)


def _are_single(config: Any, segment_ids: Int[Array, "B T"] | None) -> bool:
    """Return whether a row has one document."""
    return segment_ids is None or not config.packed


def is_edge(config: Any, level: Level, time: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return where a level has a new code: at the first token of a chunk with one, or the first behind the prefix."""
    if level == "prefix":
        return time == config.prefix
    return (time % config.chunk == 0) & is_known(config, level, time)


def edge_spacing(config: Any, level: Level) -> int:
    """Return tokens from one edge of a level to the next at least, of whichever documents."""
    return config.prefix + 1 if level == "prefix" else config.chunk


def can_change(
    config: Any, time: Int[Array, "B T"], content: Bool[Array, "B T"] | None
) -> Bool[Array, "B T"]:
    """Return where the code may be another one than at the token before.

    At a chunk's edge weights may move on to a level that has no code yet, so any level with one makes it an edge.
    """
    levels = levels_of(config)
    if "token" in levels:
        return jnp.ones(time.shape, bool) if content is None else content
    edges = [time == config.prefix if level == "prefix" else time % config.chunk == 0 for level in levels]
    known = [is_known(config, level, time) for level in levels]
    return jnp.any(jnp.stack(edges), 0) & jnp.any(jnp.stack(known), 0)


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
