"""How often a router gives a code, and where its parts are computed."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

Level = Literal["prefix", "chunk", "token"]


def levels_of(config: Any) -> tuple[Level, ...]:
    """Return the levels of a `RouterConfig`, the coarsest first."""
    return getattr(config.level, "levels", (config.level,))


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
