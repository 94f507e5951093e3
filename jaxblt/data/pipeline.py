"""Datasets: batches as a pure function of the step, and an iterator that prefetches them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.buckets import bucket
from jaxblt.data.config import DataConfig, apply_split, open_source
from jaxblt.data.entropies import Entropies, read_entropies
from jaxblt.data.history import History
from jaxblt.data.iterator import BatchIterator
from jaxblt.data.packing import pack
from jaxblt.data.permutation import hash64
from jaxblt.data.rows import RowIndex, Span, empty_rows, pair_counts, stream_ids, write_span
from jaxblt.data.schedule import OnePass, Shuffled
from jaxblt.data.sources import DocumentSource, Regions, ReverseComplement, document_ends
from jaxblt.data.splits import SplitName
from jaxblt.data.vocab import OFFSET, PAD, VOCAB_SIZE
from jaxblt.data.windows import WindowIndex

_STRANDS = 2  # domain of the random key


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows of one split: row (step, slot) depends on config, step and slot, not on the processes.

    Made by `make_dataset`.

    Attributes:
      config: what the rows are made of.
      mode: "train": endless, shuffled, augmented; "eval": every target scored once, in order, as it stands.
      source: the documents of the split.
      indexes: one list of rows for each row length.
      schedule: which row stands where.
      process_index, process_count: this process makes slots [i·B/n, (i+1)·B/n) of each batch of B rows.
      entropies: precomputed, of the whole source.
      history: what comes with rows that begin inside a document; for windows, which hold one document each.
    """

    config: DataConfig
    mode: Literal["train", "eval"]
    source: Regions
    indexes: tuple[RowIndex, ...]
    schedule: Shuffled | OnePass
    process_index: int = 0
    process_count: int = 1
    entropies: Entropies | None = None
    history: History | None = None

    @property
    def num_rows(self) -> int:
        """Rows in one pass over the split."""
        return sum(len(index) for index in self.indexes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the split."""
        return int(self.source.lengths.sum())

    @property
    def num_batches(self) -> int | None:
        """Batches in all: of one pass in evaluation, None in training, which has no end."""
        return len(self.schedule) if isinstance(self.schedule, OnePass) else None

    @property
    def slots(self) -> range:
        """The slots of a batch that this process makes."""
        share = self.config.batch_size // self.process_count
        return range(self.process_index * share, (self.process_index + 1) * share)

    def batch(self, step: int, *, slots: Sequence[int] | None = None) -> Batch:
        """This process's rows of the batch of a step, as numpy arrays [slots, T].

        Args:
          step: from 0.
          slots: rows to make; by default those of this process.

        Raises:
          IndexError: in evaluation, the step lies beyond the last batch; a slot lies outside the batch.
        """
        if step < 0:
            raise IndexError(f"step must be at least 0, got {step}")
        slots = self.slots if slots is None else slots
        place = self.schedule.place(step)
        index = self.indexes[place.bucket]
        rows: dict[str, Any] = empty_rows(len(slots), index.row_length)
        if self.entropies is not None:
            rows["entropies"] = np.zeros((len(slots), index.row_length), np.float32)
        if self.history is not None:
            rows["history"] = np.full((len(slots), self.history.length), PAD, np.int32)
        for i, slot in enumerate(slots):
            if not 0 <= slot < self.config.batch_size:
                raise IndexError(f"slot {slot} lies outside 0..{self.config.batch_size - 1}")
            number = self.schedule.row(place, slot)
            spans = [] if number is None else index.spans(number)
            self._fill({name: values[i] for name, values in rows.items()}, spans, step, slot)
        if self.config.scored is not None:
            rows["loss_mask"] *= _among(self.config.scored)[rows["targets"]]
        return Batch(**rows)

    def iterator(self, start_step: int = 0, *, prefetch: int = 4, workers: int = 0) -> BatchIterator:
        """Batches from `start_step` on, prepared ahead; its only state is the step.

        Args:
          start_step: the first step.
          prefetch: batches to hold ready; 0 makes each where it is asked for.
          workers: processes that make them (they import the main script, which needs its
            `if __name__ == "__main__":`); 0 uses a thread of this one.
        """
        return BatchIterator(self, start_step, prefetch=prefetch, workers=workers)

    def _fill(self, row: dict[str, np.ndarray], spans: Sequence[Span], step: int, slot: int) -> None:
        for k, span in enumerate(spans):
            self._write(row, span, k + 1, flip=self._flips(step, slot, k))

    def _flips(self, step: int, slot: int, k: int) -> bool:
        wanted = self.config.reverse_complement and self.mode == "train"
        return wanted and hash64(self.config.seed, _STRANDS, step, slot, k) % 2 == 1

    def _write(self, row: dict[str, np.ndarray], span: Span, segment: int, *, flip: bool) -> None:
        if flip:  # the same bytes from the other strand
            length = int(self.source.lengths[span.document])
            start, stop = length - span.stop, length - span.start
            ids = stream_ids(ReverseComplement(self.source), span.document, start, stop)
        else:
            ids = stream_ids(self.source, span.document, span.start, span.stop)
        write_span(row, ids, span, segment)
        if self.history is not None:
            before = self.history.ids(self.source, span, flip=flip)
            row["history"][self.history.length - len(before) :] = before
        if self.entropies is not None:
            document, shift = (int(x[span.document]) for x in (self.source.documents, self.source.starts))
            place = slice(span.offset, span.offset + span.stop - span.start)
            row["entropies"][place] = self.entropies.read(document, shift + span.start, shift + span.stop)


def _among(characters: str) -> np.ndarray:
    """Int32[260]: 1 for the ids of the bytes in `characters`."""
    table = np.zeros(VOCAB_SIZE, np.int32)
    table[np.frombuffer(characters.encode("utf-8"), np.uint8).astype(np.int32) + OFFSET] = 1
    return table


def make_dataset(
    config: DataConfig,
    *,
    split: SplitName = "train",
    mode: Literal["train", "eval"] = "train",
    source: DocumentSource | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Dataset:
    """Opens the data of a config, takes one split of it, and computes which bytes make up which row.

    Args:
      config: the data.
      split: the part to read.
      mode: "train" for endless shuffled batches; "eval" for one pass that scores every target byte once.
      source: documents to use instead of those that the config names.
      process_index: this process.
      process_count: processes that share each batch.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: bad data, an unknown split or sample, a split without bytes, windows longer than every
        document, or a batch that the processes cannot share equally.
    """
    if mode not in ("train", "eval"):
        raise ValueError(f"unknown mode {mode!r}: choose 'train' or 'eval'")
    if not 0 <= process_index < process_count or config.batch_size % process_count:
        raise ValueError(
            f"batch_size = {config.batch_size} must be a multiple of process_count = {process_count}, and "
            f"process_index = {process_index} one of 0..{process_count - 1}"
        )
    whole = open_source(config) if source is None else source
    part = apply_split(config, whole, split)
    pairs = pair_counts(part.lengths, document_ends(part), eos=config.ends_with_eos)
    indexes = tuple(index for index in _indexes(config, pairs, mode, split) if len(index))
    if not indexes:
        raise ValueError(
            f"split {split!r} holds no byte: check the data, or change fractions {config.fractions}"
        )
    rows = tuple(len(index) for index in indexes)
    schedule = (
        Shuffled(rows, config.batch_size, config.seed)
        if mode == "train"
        else OnePass(rows, config.batch_size)
    )
    entropies = None if config.entropies is None else read_entropies(config.entropies, whole)
    return Dataset(config, mode, part, indexes, schedule, process_index, process_count, entropies)


def _indexes(config: DataConfig, pairs: np.ndarray, mode: str, split: str) -> Sequence[RowIndex]:
    options: dict[str, Any] = {"alignment": config.alignment, "long_documents": config.long_documents}
    if config.packing == "windows":
        return [_windows(config, pairs, mode, split)]
    if config.packing == "buckets":
        return bucket(pairs, config.buckets, config.seq_len, **options)
    return [pack(pairs, config.seq_len, method=config.packing, **options)]


def _windows(config: DataConfig, pairs: np.ndarray, mode: str, split: str) -> WindowIndex:
    if mode == "eval":
        return WindowIndex(pairs, config.seq_len, config.seq_len - config.context, score="new")
    if len(pairs) and pairs.max() < config.seq_len:
        raise ValueError(
            f"seq_len = {config.seq_len} is longer than every document of split {split!r} (the longest has "
            f"{pairs.max()} targets): lower seq_len, or pack documents with packing='first_fit'"
        )
    stride = config.seq_len if config.stride is None else config.stride
    return WindowIndex(pairs, config.seq_len, stride, config.partial)
