"""Which row stands in slot s of step k, by arithmetic on integers: the step is the whole state."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxblt.data.permutation import permute

_ROWS, _BATCHES = 0, 1  # domains of the random keys


class Place(NamedTuple):
    """The bucket that a batch is taken from, and the first of its samples, counted over all epochs."""

    bucket: int
    sample: int


@dataclass(frozen=True)
class Shuffled:
    """Endless: each epoch visits every row once in a new order.

    Sample g of a bucket of n rows is row permutation_{g // n}(g mod n); batches run across the ends of
    epochs, so none is short. With e epochs begun, bucket b has yielded ceil(e·n_b / B_b) batches; an
    epoch's batches of all buckets are dealt in a random order.

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
        """The last epoch whose batches begin at or before `step`."""
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
        return sum(self._batches())

    def _batches(self) -> list[int]:
        return [-(-n // self._sizes[b]) for b, n in enumerate(self.rows)]

    def place(self, step: int) -> Place:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} does not exist: one pass has {len(self)} batches")
        bucket, batches = 0, self._batches()
        while step >= batches[bucket]:
            step, bucket = step - batches[bucket], bucket + 1
        return Place(bucket, step * self._sizes[bucket])

    def row(self, place: Place, slot: int) -> int | None:
        row = place.sample + slot
        return row if row < self.rows[place.bucket] else None


@dataclass(frozen=True)
class Staged:
    """One bucket after the other, for rows that grow: bucket i is shuffled from step `begins[i]` to the next one's.

    Attributes:
      stages: the order within each bucket, which has one.
      begins: first steps, rising from 0.
    """

    stages: tuple[Shuffled, ...]
    begins: tuple[int, ...]

    def place(self, step: int) -> Place:
        stage = bisect_right(self.begins, step) - 1
        return Place(stage, self.stages[stage].place(step - self.begins[stage]).sample)

    def row(self, place: Place, slot: int) -> int:
        return self.stages[place.bucket].row(Place(0, place.sample), slot)


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
