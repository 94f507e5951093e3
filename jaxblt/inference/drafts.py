"""Drafts: bytes that may come next, guessed from a row's own bytes for a model to read in one call."""

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.validation import check_bounds, check_fields

MOST_DRAFTED = 16
"""The most bytes of a draft: what a compiled program has room for, whatever is asked."""

LONGEST_MATCH = 16
"""Bytes up to which two contexts are compared."""


@dataclasses.dataclass(frozen=True)
class Drafts:
    """The settings of drafted bytes. They change how fast bytes come, and no byte.

    Attributes:
      count: the most bytes to draft a call, from 0 to 16; 0 drafts none and runs the same program.
      drafter: "lookup" copies what followed the longest earlier match of a row's last bytes, the latest of several.
        "counts" takes the byte that followed its last `order` bytes most often, then goes on from there.
      order: bytes that must match, from 1 to 16.

    Raises:
      ValueError: a value lies outside its range.
    """

    count: int = 8
    drafter: Literal["lookup", "counts"] = "lookup"
    order: int = 3

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "count", least=0, most=MOST_DRAFTED, why=": 0 drafts nothing")
        check_bounds(self, "order", least=1, most=LONGEST_MATCH)

    @property
    def arrays(self) -> "DraftArrays":
        """The settings as values to a compiled program."""
        values = (self.count, self.order, self.drafter == "counts")
        return DraftArrays(*(jnp.asarray(value) for value in values))


@flax.struct.dataclass
class DraftArrays:
    """The settings of `Drafts` that a compiled program reads: with others it is the same program."""

    count: Int[Array, ""]
    order: Int[Array, ""]
    by_counts: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class DraftCounts:
    """The work of one `generate` with drafts.

    Attributes:
      calls: calls of the model that drew bytes, for all rows together.
      drawn, drafted, accepted: bytes of each row: all of them, those that were drafted, and those that were right.
    """

    calls: int
    drawn: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    def __str__(self) -> str:
        """Return one line for people."""
        drawn, drafted, accepted = sum(self.drawn), sum(self.drafted), sum(self.accepted)
        return (
            f"{drawn} bytes in {self.calls} calls; {drafted} were drafted, and {accepted} of them were right"
        )


def draft(
    settings: DraftArrays, history: Int[Array, "B L"], length: Int[Array, "B"]
) -> tuple[Int[Array, "B N"], Int[Array, "B"]]:
    """Return ids that may follow each row's first `length` ids, and how many of them are meant."""
    ids, found = jax.lax.cond(settings.by_counts, _count, _look_up, settings.order, history, length)
    return ids, jnp.minimum(found, settings.count)


def _matches(history: Int[Array, "B L"], last: Int[Array, "B N"]) -> Int[Array, "B L"]:
    """Return how many of the last ids, the newest of which is `last[:, 0]`, end at each place of the row."""
    run = jnp.ones(history.shape, bool)
    length = jnp.zeros(history.shape, jnp.int32)
    for lag in range(LONGEST_MATCH):
        # Nothing stands before a row's first id: -1 matches none
        here = jnp.pad(history, ((0, 0), (lag, 0)), constant_values=-1)[:, : history.shape[1]]
        run &= here == last[:, lag : lag + 1]
        length += run.astype(jnp.int32)
    return length


def _last_ids(history: Int[Array, "B L"], length: Int[Array, "B"]) -> Int[Array, "B N"]:
    """Return the last ids of each row, the newest first; -2 where there are fewer."""
    place = length[:, None] - 1 - jnp.arange(LONGEST_MATCH, dtype=jnp.int32)[None]
    return jnp.where(place >= 0, jnp.take_along_axis(history, jnp.maximum(place, 0), 1), -2)


def _look_up(
    order: Int[Array, ""], history: Int[Array, "B L"], length: Int[Array, "B"]
) -> tuple[Int[Array, "B N"], Int[Array, "B"]]:
    """Copy what followed the longest match; behind the row's end the copy goes on with itself."""
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    found = jnp.where(place < length[:, None] - 1, _matches(history, _last_ids(history, length)), 0)
    best = jnp.max(found, 1)
    end = jnp.max(jnp.where(found == best[:, None], place, 0), 1)
    step = jnp.arange(MOST_DRAFTED, dtype=jnp.int32)[None]
    source = end[:, None] + 1 + step % jnp.maximum(length - 1 - end, 1)[:, None]
    ids = jnp.take_along_axis(history, jnp.minimum(source, history.shape[1] - 1), 1)
    return ids, jnp.where(best >= order, MOST_DRAFTED, 0)


def _count(
    order: Int[Array, ""], history: Int[Array, "B L"], length: Int[Array, "B"]
) -> tuple[Int[Array, "B N"], Int[Array, "B"]]:
    """Take the most frequent follower of the last `order` ids, again and again, until they have none."""
    rows = jnp.arange(len(history), dtype=jnp.int32)[:, None]
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    follower = jnp.pad(history[:, 1:], ((0, 0), (0, 1)))

    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        last, going = state
        ends = (_matches(history, last) >= order) & (place < length[:, None] - 1)
        counts = jnp.zeros((len(history), VOCAB_SIZE), jnp.int32)
        counts = counts.at[rows, follower].add(ends.astype(jnp.int32))
        best = jnp.argmax(counts, 1).astype(jnp.int32)
        going &= jnp.any(ends, 1)
        return (jnp.concatenate([best[:, None], last[:, :-1]], 1), going), (best, going)

    start = (_last_ids(history, length), jnp.ones(length.shape, bool))
    _, (ids, going) = jax.lax.scan(step, start, None, length=MOST_DRAFTED)
    return ids.T, jnp.sum(going, 0, dtype=jnp.int32)
