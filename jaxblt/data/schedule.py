"""The row in slot s of step k, by arithmetic on integers: the step is the whole state."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from jaxblt.data.permutation import hash64, permute

_ROWS, _BATCHES, STRANDS, _SOURCES, _EASY = 0, 1, 2, 3, 4  # domains of the random keys
LEAST_BLOCK = 256
"""The least samples of a block among which sources are dealt."""


class Place(NamedTuple):
    """The bucket that a batch is taken from, and the first of its samples, counted over all epochs."""

    bucket: int
    sample: int


@dataclass(frozen=True)
class Shuffled:
    """Endless: each epoch visits every row once in a new order.

    Sample g of a bucket of n rows is row permutation_{g // n}(g mod n). Batches run across the ends of epochs, so none
    is short: after e epochs bucket b has yielded ceil(e·n_b / B_b) batches. The batches of an epoch come from all
    buckets in a random order.

    Attributes:
      rows: rows in each bucket, at least 1.
      batch_size: rows in a batch (B), of all buckets or of each.
      seed: picks the orders.
    """

    rows: tuple[int, ...]
    batch_size: int | tuple[int, ...]
    seed: int
    _sizes: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", _of_each(self.batch_size, len(self.rows)))

    def place(self, step: int) -> Place:
        epoch = self._epoch(step)
        first = [self._batches(b, epoch) for b in range(len(self.rows))]
        counts = [self._batches(b, epoch + 1) - first[b] for b in range(len(self.rows))]
        turn = step - sum(first)
        if len(self.rows) > 1:
            turn = permute(turn, sum(counts), self.seed, _BATCHES, epoch)
        bucket = 0
        while turn >= counts[bucket]:
            turn, bucket = turn - counts[bucket], bucket + 1
        return Place(bucket, (first[bucket] + turn) * self._sizes[bucket])

    def row(self, place: Place, slot: int) -> int:
        epoch, i = divmod(place.sample + slot, self.rows[place.bucket])
        return permute(i, self.rows[place.bucket], self.seed, _ROWS, place.bucket, epoch)

    def _batches(self, bucket: int, epochs: int) -> int:
        return -(-epochs * self.rows[bucket] // self._sizes[bucket])

    def _epoch(self, step: int) -> int:
        """Return the last epoch whose batches begin at or before `step`."""
        return _last_at_most(step, lambda e: sum(self._batches(b, e) for b in range(len(self.rows))))


def _of_each(batch_size: int | tuple[int, ...], buckets: int) -> tuple[int, ...]:
    return (batch_size,) * buckets if isinstance(batch_size, int) else batch_size


def _last_at_most(limit: int, value) -> int:
    high = 1
    while value(high) <= limit:
        high *= 2
    return bisect_right(range(high), limit, key=value) - 1


@dataclass(frozen=True)
class OnePass:
    """Every row once, in order, bucket after bucket; slots beyond a bucket's last row are empty.

    Attributes:
      rows: rows in each bucket, at least 1.
      batch_size: rows in a batch, of all buckets or of each.
    """

    rows: tuple[int, ...]
    batch_size: int | tuple[int, ...]
    _sizes: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", _of_each(self.batch_size, len(self.rows)))

    def __len__(self) -> int:
        return sum(self.batches)

    @property
    def batches(self) -> list[int]:
        """Batches of each bucket."""
        return [-(-n // self._sizes[b]) for b, n in enumerate(self.rows)]

    def place(self, step: int) -> Place:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} does not exist: one pass has {len(self)} batches")
        bucket, batches = 0, self.batches
        while step >= batches[bucket]:
            step, bucket = step - batches[bucket], bucket + 1
        return Place(bucket, step * self._sizes[bucket])

    def row(self, place: Place, slot: int) -> int | None:
        row = place.sample + slot
        return row if row < self.rows[place.bucket] else None


def spread(batches: int, most: int | None) -> list[int]:
    """Choose `most` batches of one pass, evenly spread over it.

    The first ones would be the shortest rows, or the first documents.

    Args:
      batches: of the whole pass.
      most: that are scored; None for all.
    """
    count = batches if most is None else min(most, batches)
    return [i * batches // count for i in range(count)]


@dataclass(frozen=True)
class Staged:
    """One bucket after the other, for rows that grow: bucket i is shuffled from step `begins[i]` to the next one's.

    Attributes:
      stages: the order within each bucket, which has one.
      begins: first steps, rising from 0.
    """

    stages: tuple["Shuffled | Mixed", ...]
    begins: tuple[int, ...]

    def place(self, step: int) -> Place:
        stage = bisect_right(self.begins, step) - 1
        return Place(stage, self.stages[stage].place(step - self.begins[stage]).sample)

    def row(self, place: Place, slot: int) -> int:
        return self.stages[place.bucket].row(Place(0, place.sample), slot)


@dataclass(frozen=True)
class Mixed:
    """Endless rows of several sources, in shares that go by weights; each source is read epoch by epoch.

    Samples are dealt block by block. Of the first n blocks of M samples, source s gets floor(n·M·c_s) -
    floor(n·M·c_{s-1}), where c_s is the cumulative share. Its share of any block is exact up to one sample. Which
    samples of a block these are is random. The k-th sample of a source with n rows is its row
    permutation_{k // n}(k mod n).

    Attributes:
      rows: rows of each source, at least 1. Rows of all are numbered one source after the other.
      weights: of each source, above 0.
      batch_size: rows in a batch (B).
      seed: picks sources and orders.
    """

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    batch_size: int
    seed: int
    _shares: tuple[Fraction, ...] = field(init=False, repr=False)
    _block: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        exact = [Fraction(weight) for weight in self.weights]
        total = sum(exact)
        object.__setattr__(
            self, "_shares", tuple(part / total for part in accumulate(exact, initial=Fraction(0)))
        )
        # Hold a sample of every source in a block, or the counts of two neighbours might cross
        object.__setattr__(self, "_block", max(LEAST_BLOCK, math.ceil(total / min(exact))))

    def place(self, step: int) -> Place:
        return Place(0, step * self.batch_size)

    def row(self, place: Place, slot: int) -> int:
        block, i = divmod(place.sample + slot, self._block)
        turn = permute(i, self._block, self.seed, _SOURCES, block)
        before, after = self._dealt(block), self._dealt(block + 1)
        edges = [high - low for low, high in zip(before, after, strict=True)]
        source = bisect_right(edges, turn) - 1
        drawn = before[source + 1] - before[source] + turn - edges[source]
        epoch, k = divmod(drawn, self.rows[source])
        return sum(self.rows[:source]) + permute(k, self.rows[source], self.seed, _ROWS, source, epoch)

    def _dealt(self, blocks: int) -> list[int]:
        """Count the samples of so many blocks that go to the first 0, 1, ... sources."""
        return [blocks * self._block * share.numerator // share.denominator for share in self._shares]


LEAST_SHARE = 0.1
"""The share of rows, the easiest ones, from which the first step of a curriculum draws."""


@dataclass(frozen=True)
class EasyFirst:
    """A curriculum: before step `until` rows are drawn from the easiest rows, and from more of them with each step.

    At step k these are n √(s² + (1 - s²) k / until) rows, s = LEAST_SHARE (Platanios et al., 1903.09848, eq. 7). They
    are drawn one by one, so a row may come twice before another comes once. From `until` on, `then` has its own order.

    Attributes:
      order: rows of the one bucket from easy to hard.
      batch_size: rows in a batch (B).
      until: steps of the curriculum.
      then: the order behind it.
      seed: picks the rows.
    """

    order: tuple[int, ...]
    batch_size: int
    until: int
    then: Shuffled
    seed: int

    def place(self, step: int) -> Place:
        if step < self.until:
            return Place(0, step * self.batch_size)
        return Place(0, self.until * self.batch_size + self.then.place(step - self.until).sample)

    def row(self, place: Place, slot: int) -> int:
        begun = self.until * self.batch_size
        if place.sample >= begun:
            return self.then.row(Place(0, place.sample - begun), slot)
        share = LEAST_SHARE**2 + (1 - LEAST_SHARE**2) * (place.sample / begun)
        most = math.ceil(len(self.order) * math.sqrt(share))
        return self.order[hash64(self.seed, _EASY, place.sample + slot) % most]


@dataclass(frozen=True)
class Endless:
    """Rows that are made as they are asked for: slot s of step k holds row k·B + s, and no row comes twice.

    Attributes:
      batch_size: rows in a batch (B).
    """

    batch_size: int

    def place(self, step: int) -> Place:
        return Place(0, step * self.batch_size)

    def row(self, place: Place, slot: int) -> int:
        return place.sample + slot
