"""Which keys a query sees: an interval of keys around each query, cut down to documents and to lengths.

    causal = masks.CAUSAL & masks.window(512) & masks.documents(segment_ids)

Masks combine with `&`: a key is visible iff every one of them lets the query see it. What is known when a program is
compiled, the interval, is static and hashable, and kernels are chosen by it; ids, positions and lengths are arrays.
Any other condition on positions is a rule (`rules.py`), which joins a mask by `&`, too.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.attention.choices import by_query
from pallas_kernels.attention.rules import And, Interval, Rule

EMPTY_LSE = -1e30
"""Log-sum-exp of a query that sees no key: finite, so that merging partial results needs no special case."""

Shaped = Array | jax.ShapeDtypeStruct
"""An array, or its shape and dtype, which is all that `explain` reads."""


class PerToken(NamedTuple):
    """A number for every query and for every key; `kv` is None where queries and keys are the same tokens."""

    q: Int[Array, "B T"]
    kv: Int[Array, "B S"] | None

    @property
    def of_keys(self) -> Any:
        """The numbers of the keys."""
        return self.q if self.kv is None else self.kv


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Conditions that must all hold for a key to be visible; made by the functions of this module.

    Attributes:
      interval: of positions around the query's.
      segments: document ids of queries and keys: visible are equal ids > 0.
      positions: what `interval`, `rule` and ALiBi compare; indices if None.
      q_lengths: the query's index < q_lengths[b].
      kv_lengths: the key's index < kv_lengths[b]; or kv_lengths[b, r] for the queries of the r-th of R equal runs.
      rule: any other condition on positions; None for none.
    """

    interval: Interval = field(default=Interval(), metadata={"static": True})
    segments: PerToken | None = None
    positions: PerToken | None = None
    q_lengths: Int[Array, "B"] | None = None
    kv_lengths: Int[Array, "B"] | Int[Array, "B R"] | None = None
    rule: Rule | None = None

    def __and__(self, other: "Mask | Rule") -> "Mask":
        """Return the mask of both conditions.

        Raises:
          ValueError: both have segment ids, or both have positions.
        """
        if isinstance(other, And):
            return self & other.a & other.b
        if isinstance(other, Rule):
            other = Mask(other) if isinstance(other, Interval) else Mask(rule=other)
        return Mask(
            self.interval & other.interval,
            _only("segment ids", self.segments, other.segments),
            _only("positions", self.positions, other.positions),
            _shorter(self.q_lengths, other.q_lengths),
            _shorter(self.kv_lengths, other.kv_lengths),
            _both(self.rule, other.rule),
        )

    __rand__ = __and__

    @property
    def same_tokens(self) -> bool:
        """True if documents are promised to be those of the same tokens, queries and keys."""
        return self.segments is not None and self.segments.kv is None

    def places(self, queries: int, keys: int) -> tuple[Int[Array, "#B T"], Int[Array, "#B S"]]:
        """Return the positions of queries and keys: those given, or indices."""
        if self.positions is not None:
            return self.positions.q, self.positions.of_keys
        here, there = (jnp.arange(size, dtype=jnp.int32)[None] for size in (queries, keys))
        return here, there

    def distances(self, queries: int, keys: int) -> Int[Array, "B T S"]:
        """Return the position of the query less position of the key; B is 1 if they are indices."""
        here, there = self.places(queries, keys)
        return here[:, :, None] - there[:, None, :]

    def dense(self, queries: int, keys: int) -> Bool[Array, "B T S"]:
        """Return all but the rule as an array; B is 1 if it is the same for all rows."""
        distance = self.distances(queries, keys)
        seen = jnp.ones_like(distance, bool)
        for condition in self.interval.conditions(distance):
            seen &= condition
        if self.segments is not None:
            seen = seen & (self.segments.q[:, :, None] == self.segments.of_keys[:, None, :])
        q_valid, kv_valid = self.valid(queries, keys)
        seen = seen if q_valid is None else seen & q_valid[:, :, None]
        return seen if kv_valid is None else seen & kv_valid[:, None, :]

    def seen(self, queries: int, keys: int) -> Bool[Array, "#B #G 1 T S"]:
        """Return the whole mask as an array, by key head if the rule is; B is 1 if it is the same for all rows."""
        seen = self.dense(queries, keys)[:, None, None]
        if self.rule is None:
            return seen
        here, there = self.places(queries, keys)
        rule = jax.tree.map(lambda lists: lists[:, :, None], by_query(self.rule, queries))
        return seen & rule.sees(here[:, None, None, :, None], there[:, None, None, None, :])

    @property
    def has_tags(self) -> bool:
        """True if documents or lengths hide keys."""
        return any(x is not None for x in (self.segments, self.q_lengths, self.kv_lengths))

    def tags(self, queries: int, keys: int) -> tuple[Int[Array, "#B T"], Int[Array, "#B S"]]:
        """Return numbers that are equal iff documents and lengths show the key; 0 and -1 where no token is."""
        q_valid, kv_valid = self.valid(queries, keys)
        q_ids, kv_ids = (None, None) if self.segments is None else (self.segments.q, self.segments.of_keys)
        return _tags(q_ids, q_valid, queries, 0), _tags(kv_ids, kv_valid, keys, -1)

    def valid(self, queries: int, keys: int) -> tuple[Bool[Array, "B T"] | None, Bool[Array, "B S"] | None]:
        """Return the queries and keys that are neither padding nor holes; None where all are valid."""
        q_ids, kv_ids = (None, None) if self.segments is None else (self.segments.q, self.segments.of_keys)
        return _valid(q_ids, self.q_lengths, queries), _valid(kv_ids, self.kv_lengths, keys)


FULL = Mask()
"""Every query sees every key."""

CAUSAL = Mask(Interval(after=0))
"""Keys at or before the query's position."""


def window(size: int | None) -> Mask:
    """Show keys at a distance of fewer than `size` positions on either side, the query's own included; None for all.

    Raises:
      ValueError: size is below 1.
    """
    if size is not None and size < 1:
        raise ValueError(f"window must be at least 1 (the query's own position), got {size}")
    return FULL if size is None else Mask(Interval(size - 1, size - 1))


def band(causal: bool, size: int | None = None) -> Mask:
    """Return the mask of a layer's config: `window(size)`, and `CAUSAL` too if `causal`."""
    return CAUSAL & window(size) if causal else window(size)


def documents(q_ids: Int[Shaped, "B T"] | None, kv_ids: Int[Shaped, "B S"] | None = None) -> Mask:
    """Show keys of the query's own document: ids are equal, and > 0; without any ids, all keys.

    Without `kv_ids` this is the promise that queries and keys are the same tokens, which some kernels need.
    """
    return FULL if q_ids is None else Mask(segments=PerToken(q_ids, kv_ids))  # pyright: ignore[reportArgumentType]


def positions(q: Int[Shaped, "B T"], kv: Int[Shaped, "B S"]) -> Mask:
    """Hide nothing, but measure the distances of `CAUSAL`, `window` and ALiBi between these instead of indices."""
    return Mask(positions=PerToken(q, kv))  # pyright: ignore[reportArgumentType]


def query_lengths(lengths: Int[Shaped, "B"]) -> Mask:
    """Hide all keys from queries at an index >= lengths[b]."""
    return Mask(q_lengths=lengths)  # pyright: ignore[reportArgumentType]


def key_lengths(lengths: Int[Shaped, "B"] | Int[Shaped, "B R"]) -> Mask:
    """Show keys at an index < lengths[b]; or < lengths[b, r] for each of R equal runs of the queries."""
    return Mask(kv_lengths=lengths)  # pyright: ignore[reportArgumentType]


def token_lengths(lengths: Int[Shaped, "B"]) -> Mask:
    """Return `query_lengths` and `key_lengths`, where both are the same tokens."""
    return query_lengths(lengths) & key_lengths(lengths)


def prefix(lengths: Int[Array, "B"], size: int) -> Bool[Array, "B S"]:
    """Return True at the first lengths[b] places of row b."""
    return jnp.arange(size, dtype=jnp.int32)[None] < lengths[:, None]


def _valid(
    ids: Int[Array, "B T"] | None, lengths: Int[Array, "B"] | None, size: int
) -> Bool[Array, "B T"] | None:
    valid = None if ids is None else ids > 0
    if lengths is None:
        return valid
    return prefix(lengths, size) if valid is None else valid & prefix(lengths, size)


def _tags(
    ids: Int[Array, "B T"] | None, valid: Bool[Array, "B T"] | None, size: int, invalid: int
) -> Int[Array, "#B T"]:
    tags = jnp.ones((1, size), jnp.int32) if ids is None else ids.astype(jnp.int32)
    return tags if valid is None else jnp.where(valid, tags, jnp.int32(invalid))


def _only[T](what: str, a: T | None, b: T | None) -> T | None:
    if a is not None and b is not None:
        raise ValueError(f"two masks with {what} do not combine: give every token one number")
    return b if a is None else a


def _shorter(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return jnp.minimum(a, b)


def _both(a: Rule | None, b: Rule | None) -> Rule | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b
