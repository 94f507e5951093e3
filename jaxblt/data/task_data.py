"""Rows of a task: one example a row, generated or loaded, as a pure function of seed, step and slot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.buckets import bucket, rows_within
from jaxblt.data.config import DataConfig
from jaxblt.data.dataset import Dataset, Row
from jaxblt.data.examples import Examples, TaskSource
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.packing import PackedIndex
from jaxblt.data.schedule import Endless, OnePass, Shuffled
from jaxblt.data.splits import SplitName
from jaxblt.data.vocab import OFFSET
from jaxblt.validation import MOST_SEED, check_bounds, check_fields

MOST_SAMPLED = 4096
"""Examples that tell a task's files from others."""


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig:
    """Data of a run that learns a task; stands where a `DataConfig` does.

    Attributes:
      task: config of the task, such as `jaxblt.data.tasks.MQAR`.
      seq_len: positions in a row (T); its longest example must fit.
      batch_size: rows in a batch, over all processes.
      buckets: lengths of shorter rows, for tasks whose examples are loaded and differ in length.
      max_tokens: the most positions of a batch; one of longer rows has fewer of them. None sets no limit.
      seed: picks an endless training split's examples, and else their order.
      labels: how a row's one answer becomes `Batch.labels`, for the objective `Classify`. "digit" reads the bytes "0"
        to "9", as in texts and files. "symbol" takes the number of a symbol, as in drawn tasks. None for no labels.

    Raises:
      ValueError: an option is out of range, or a row is too short for the task.
    """

    task: Any
    seq_len: int
    batch_size: int = 8
    buckets: tuple[int, ...] = ()
    max_tokens: int | None = None
    seed: int = 0
    labels: Literal["digit", "symbol"] | None = None

    packing = "buckets"  # one example a row, with padding behind it
    alignment = 1
    entropies = None

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.task, type) or not isinstance(self.task, TaskSource):
            raise ValueError(
                f"TaskDataConfig.task must be the config of a task, such as MQAR(), got {self.task!r}"
            )
        check_bounds(self, "seq_len", "batch_size", "buckets", least=1)
        check_bounds(self, "max_tokens", least=self.seq_len, why=": a row of seq_len must fit")
        check_bounds(self, "seed", least=0, most=MOST_SEED)
        if self.seq_len < self.task.length:
            raise ValueError(
                f"TaskDataConfig.seq_len must be at least {self.task.length}, the longest example of "
                f"{type(self.task).__name__}, got {self.seq_len}"
            )

    def rows_of(self, row_length: int) -> int:
        """Return the number of rows in a batch of rows of this length."""
        return rows_within(row_length, most_rows=self.batch_size, max_tokens=self.max_tokens)

    @property
    def vocab_size(self) -> int:
        """Ids that its rows may hold."""
        return self.task.vocab_size

    @property
    def num_classes(self) -> int | None:
        """Classes that its labels may be of: the task's `num_answers`, or all digits or symbols if it has none.

        None without labels.
        """
        if self.labels is None:
            return None
        most = 10 if self.labels == "digit" else self.vocab_size - OFFSET
        return getattr(self.task, "num_answers", most)


RowsConfig = DataConfig | TaskDataConfig | LabelledDataConfig
"""The data that a run reads: documents of bytes, a task, or labelled records."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TaskDataset(Dataset):
    """Rows of one example each.

    Attributes:
      examples: of the split.
      indexes: which example a row of each bucket holds; empty where row n is example n.
    """

    config: TaskDataConfig
    examples: Examples
    indexes: tuple[PackedIndex, ...] = ()

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return tuple(index.row_length for index in self.indexes) or (self.config.seq_len,)

    @property
    def num_rows(self) -> int | None:
        return self.examples.count

    @property
    def num_bytes(self) -> int | None:
        return None if self.examples.lengths is None else int(self.examples.lengths.sum())

    def sample(self) -> Iterator[bytes]:
        """Give examples that were read; those that are made on the way have no lengths."""
        lengths = self.examples.lengths
        count = 0 if lengths is None else len(lengths)
        for number in np.linspace(0, count - 1, min(count, MOST_SAMPLED)).astype(np.int64):
            yield from (np.ascontiguousarray(part).tobytes() for part in self.examples.example(int(number)))

    def fill_row(self, row: Row, bucket: int, number: int, step: int, slot: int) -> None:
        inputs, targets, scored = self.examples.example(self._example(bucket, number))
        count = len(inputs)
        if count > len(row["inputs"]):
            raise ValueError(
                f"{type(self.config.task).__name__} gave an example of {count} positions for a row of "
                f"{len(row['inputs'])}: its `length` must be that of its longest example"
            )
        size = self.config.vocab_size
        for ids in (inputs, targets):
            if not np.issubdtype(ids.dtype, np.integer) or np.any((ids < 0) | (ids >= size)):
                raise ValueError(
                    f"ids of {type(self.config.task).__name__} must be integers in 0..{size - 1}, as its `vocab_size` "
                    f"says, got {ids.min()}..{ids.max()} of {ids.dtype}"
                )
        row["inputs"][:count], row["targets"][:count] = inputs, targets
        row["segment_ids"][:count] = 1
        row["positions"][:count] = np.arange(count)
        row["loss_mask"][:count] = scored

    def batch(self, step: int, *, slots: Sequence[int] | None = None) -> Batch:
        made = super().batch(step, slots=slots)
        if self.config.labels is None:
            return made
        return replace(made, labels=_labels(made, self.config))

    def groups(self, step: int) -> np.ndarray:
        """Return Int64[slots], the subtask of each of this process's rows.

        It is 0 without subtasks, -1 for an empty row.
        """
        bucket, groups = self.schedule.place(step).bucket, self.examples.groups
        numbers = self.row_numbers(step, self.slots(step))
        found = [
            -1 if n is None else 0 if groups is None else groups[self._example(bucket, n)] for n in numbers
        ]
        return np.array(found, np.int64)

    def _example(self, bucket: int, number: int) -> int:
        return int(self.indexes[bucket].documents[number]) if self.indexes else number


def _labels(batch: Batch, config: TaskDataConfig) -> np.ndarray:
    """Return Int32[rows], what the id that each row answers with stands for; 0 if it is empty.

    Raises:
      ValueError: a row has several answers, or one that is none of the kind.
    """
    scored = np.asarray(batch.loss_mask) > 0
    if np.any(scored.sum(1) > 1):
        raise ValueError(
            f"TaskDataConfig.labels needs rows of one answer, got {scored.sum(1).max()} in a row: set labels=None, and "
            "objective=NextByte(accuracy=True)"
        )
    kind, most = config.labels, config.num_classes
    first = OFFSET + (ord("0") if kind == "digit" else 0)
    labels, held = np.where(scored, batch.targets, 0).sum(1) - first, scored.any(1)
    if np.any(wrong := held & ((labels < 0) | (labels >= most))):
        raise ValueError(
            f"TaskDataConfig.labels = {kind!r} of {most} classes, and a row answers with id "
            f"{first + labels[wrong][0]}: set labels={'symbol' if kind == 'digit' else 'digit'!r}"
        )
    return np.where(held, labels, 0).astype(np.int32)


def open_task(
    config: TaskDataConfig,
    *,
    split: SplitName,
    mode: Literal["train", "eval"],
    process_index: int = 0,
    process_count: int = 1,
) -> TaskDataset:
    """Open one split of a task.

    Raises:
      ValueError: there is no such split, one pass over a split without end was asked for, or bad data.
      FileNotFoundError: a path names no file.
    """
    if split == "all":
        raise ValueError("a task has no split 'all': choose 'train', 'validation' or 'test'")
    examples = config.task.open(split, seed=config.seed)
    if mode == "eval" and examples.count is None:
        raise ValueError(
            f"split {split!r} of {type(config.task).__name__} has no end: choose 'validation' or 'test', or set "
            "data.task.train_size"
        )
    indexes = _bucketed(config, examples)
    return TaskDataset(
        config=config,
        mode=mode,
        schedule=_schedule(config, mode, examples, indexes),
        process_index=process_index,
        process_count=process_count,
        examples=examples,
        indexes=indexes,
    )


def _bucketed(config: TaskDataConfig, examples: Examples) -> tuple[PackedIndex, ...]:
    if not config.buckets:
        return ()
    if examples.lengths is None:
        raise ValueError(
            f"buckets {config.buckets} need examples whose lengths are known, and {type(config.task).__name__} makes "
            "its own as they are asked for: leave data.buckets empty"
        )
    return tuple(bucket(examples.lengths, config.buckets, config.seq_len, long_documents="error"))


def _schedule(
    config: TaskDataConfig, mode: str, examples: Examples, indexes: tuple[PackedIndex, ...]
) -> Shuffled | OnePass | Endless:
    lengths = [index.row_length for index in indexes] or [config.seq_len]
    sizes = tuple(config.rows_of(length) for length in lengths)
    if examples.count is None:
        return Endless(sizes[0])
    rows = tuple(len(index) for index in indexes) or (examples.count,)
    return Shuffled(rows, sizes, config.seed) if mode == "train" else OnePass(rows, sizes)
