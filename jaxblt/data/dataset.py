"""The base of every dataset: batches as a pure function of the step, and an iterator that prefetches them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.entropies import Entropies
from jaxblt.data.history import History
from jaxblt.data.iterator import BatchIterator
from jaxblt.data.rows import empty_rows
from jaxblt.data.sampled import hash_parts
from jaxblt.data.schedule import EasyFirst, Endless, Mixed, OnePass, Shuffled, Staged

Row = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Dataset(ABC):
    """Rows of one split: row (step, slot) depends on config, step and slot, not on the processes.

    Made by `make_dataset`.

    Attributes:
      config: what the rows are made of.
      mode: "train": endless, shuffled, augmented; "eval": every target scored once, in order, as it stands.
      schedule: which row stands where.
      process_index, process_count: this process makes slots [i·B/n, (i+1)·B/n) of each batch of B rows.
      entropies: precomputed, of the whole source.
      source_names: the source that a batch of each bucket is of, for evaluation over several sources.
      history: earlier bytes that come with rows that begin inside a document; only for windows, which hold one
        document each.
      names_documents: whether batches have `documents`; generated rows have none.
    """

    config: Any
    mode: Literal["train", "eval"]
    schedule: Shuffled | EasyFirst | Mixed | Staged | OnePass | Endless
    process_index: int = 0
    process_count: int = 1
    entropies: Entropies | None = None
    source_names: tuple[str, ...] = ()
    history: History | None = None
    names_documents: bool = False

    def __post_init__(self) -> None:
        for rows, length in zip(self.batch_sizes, self.row_lengths, strict=True):
            if rows % self.process_count:
                raise ValueError(
                    f"a batch of {rows} rows of {length} positions does not divide among {self.process_count} "
                    f"processes: raise max_tokens = {self.config.max_tokens}, or change batch_size"
                )

    def __repr__(self) -> str:
        """Write a short name.

        Grain asks for it where an iterator begins, and examples may be a hundred thousand arrays.
        """
        return f"<{type(self).__name__}: {self.mode}, rows of {self.row_lengths}, {self.num_rows} in all>"

    @property
    @abstractmethod
    def row_lengths(self) -> tuple[int, ...]:
        """Positions in the rows of each bucket."""

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Rows in one pass over the split; None without end."""

    @property
    @abstractmethod
    def num_bytes(self) -> int | None:
        """Bytes of the split; None where they are not known."""

    def sample(self) -> Iterator[bytes]:
        """Yield some megabytes of the data, at most, by which they are known again; nothing for drawn data."""
        return iter(())

    @cached_property
    def extent(self) -> dict[str, int | str | None]:
        """Rows and bytes of the split, and a hash of `sample`, as JSON: by these a run knows its data again."""
        return {"rows": self.num_rows, "bytes": self.num_bytes, "sample": hash_parts(self.sample())}

    @abstractmethod
    def fill_row(self, row: Row, bucket: int, number: int, step: int, slot: int) -> None:
        """Write row `number` of a bucket into `row`, which is blank.

        It stands in this slot of this step.
        """

    @property
    def num_batches(self) -> int | None:
        """Batches in all: of one pass in evaluation, None in training, which has no end."""
        return len(self.schedule) if isinstance(self.schedule, OnePass) else None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows in the batches of each bucket, over all processes."""
        return tuple(self.config.rows_of(length) for length in self.row_lengths)

    @property
    def settled(self) -> int:
        """The first step from which rows have the length that they keep."""
        return self.schedule.begins[-1] if isinstance(self.schedule, Staged) else 0

    def slots(self, step: int) -> range:
        """Return the slots of a step's batch that this process makes."""
        share = self.rows_at(step) // self.process_count
        return range(self.process_index * share, (self.process_index + 1) * share)

    def rows_at(self, step: int) -> int:
        """Return the number of rows in the batch of a step, over all processes."""
        return self.batch_sizes[self.schedule.place(step).bucket]

    def blank_rows(self, count: int, length: int) -> dict[str, Any]:
        """Return rows of padding, one array for each field of a batch."""
        return empty_rows(count, length)

    def batch(self, step: int, *, slots: Sequence[int] | None = None) -> Batch:
        """Return this process's rows of the batch of a step, as numpy arrays [slots, T].

        Args:
          step: from 0.
          slots: rows to make; by default those of this process.

        Raises:
          IndexError: in evaluation, the step lies beyond the last batch; a slot lies outside the batch.
        """
        slots = self.slots(max(step, 0)) if slots is None else slots
        numbers = self.row_numbers(step, slots)
        bucket = self.schedule.place(step).bucket
        rows = self.blank_rows(len(slots), self.row_lengths[bucket])
        for i, (slot, number) in enumerate(zip(slots, numbers, strict=True)):
            if number is not None:
                self.fill_row({name: values[i] for name, values in rows.items()}, bucket, number, step, slot)
        return Batch(**rows)

    def row_numbers(self, step: int, slots: Sequence[int]) -> list[int | None]:
        """Return which rows of their bucket stand in slots of a step; None for an empty slot.

        Raises:
          IndexError: as of `batch`.
        """
        if step < 0:
            raise IndexError(f"step must be at least 0, got {step}")
        place, most = self.schedule.place(step), self.rows_at(step)
        for slot in slots:
            if not 0 <= slot < most:
                raise IndexError(f"slot {slot} lies outside 0..{most - 1}")
        return [self.schedule.row(place, slot) for slot in slots]

    def iterator(self, start_step: int = 0, *, prefetch: int = 4, workers: int = 0) -> BatchIterator:
        """Return an iterator of batches from `start_step` on, prepared ahead.

        Its only state is the step.

        Args:
          start_step: the first step.
          prefetch: batches to hold ready; 0 makes each where it is asked for.
          workers: processes that make them (they import the main script, which needs its
            `if __name__ == "__main__":`); 0 uses a thread of this one.
        """
        return BatchIterator(self, start_step, prefetch=prefetch, workers=workers)
