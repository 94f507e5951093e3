"""Datasets: opens what a config names, and cuts documents into rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from jaxblt.data.buckets import bucket
from jaxblt.data.config import DataConfig, apply_split, check_settings, open_source
from jaxblt.data.dataset import Dataset, Row
from jaxblt.data.entropies import read_entropies
from jaxblt.data.keys import document_key
from jaxblt.data.labelled import LabelledDataConfig, open_labelled
from jaxblt.data.letters import letters_of
from jaxblt.data.mixture import JoinedRows, JoinedSource
from jaxblt.data.packing import pack
from jaxblt.data.permutation import hash64
from jaxblt.data.rows import RowIndex, Span, pair_counts, stream_ids, write_span
from jaxblt.data.sampled import sample_bytes
from jaxblt.data.schedule import STRANDS, Mixed, OnePass, Shuffled, Staged
from jaxblt.data.sources import DocumentSource, Regions, ReverseComplement, document_ends
from jaxblt.data.splits import SplitName
from jaxblt.data.task_data import TaskDataConfig, open_task
from jaxblt.data.vocab import PAD
from jaxblt.data.windows import WindowIndex
from jaxblt.validation import check_kind


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DocumentDataset(Dataset):
    """Rows cut from documents of bytes.

    Attributes:
      source: the documents of the split.
      indexes: one list of rows for each row length.
    """

    config: DataConfig
    source: Regions
    indexes: tuple[RowIndex, ...]

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return tuple(index.row_length for index in self.indexes)

    @property
    def num_rows(self) -> int:
        indexes = self.indexes[-1:] if self.settled else self.indexes
        return sum(len(index) for index in indexes)

    @property
    def num_bytes(self) -> int:
        return int(self.source.lengths.sum())

    def sample(self) -> Iterator[bytes]:
        return sample_bytes(self.source.source)

    def blank_rows(self, count: int, length: int) -> dict[str, Any]:
        rows: dict[str, Any] = super().blank_rows(count, length)
        if self.entropies is not None:
            rows["entropies"] = np.zeros((count, length), np.float32)
        if self.history is not None:
            rows["history"] = np.full((count, self.history.length), PAD, np.int32)
        if self.names_documents:
            rows["documents"] = np.zeros((count, length), np.int32)
        return rows

    def fill_row(self, row: Row, bucket: int, number: int, step: int, slot: int) -> None:
        for k, span in enumerate(self.indexes[bucket].spans(number)):
            self._write(row, span, k + 1, flip=self._flips(step, slot, k))
        if self.config.scored is not None:
            row["loss_mask"] *= letters_of(self.config).counted[row["targets"]]

    def _flips(self, step: int, slot: int, k: int) -> bool:
        wanted = self.config.reverse_complement and self.mode == "train"
        return wanted and hash64(self.config.seed, STRANDS, step, slot, k) % 2 == 1

    def _write(self, row: Row, span: Span, segment: int, *, flip: bool) -> None:
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
        if self.names_documents:
            key = document_key(self.source.source, int(self.source.documents[span.document]))
            row["documents"][span.offset : span.offset + span.stop - span.start] = key
        if self.entropies is not None:
            document, shift = (int(x[span.document]) for x in (self.source.documents, self.source.starts))
            place = slice(span.offset, span.offset + span.stop - span.start)
            row["entropies"][place] = self.entropies.read(document, shift + span.start, shift + span.stop)


def make_dataset(
    config: DataConfig | TaskDataConfig | LabelledDataConfig,
    *,
    split: SplitName = "train",
    mode: Literal["train", "eval"] = "train",
    source: DocumentSource | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Dataset:
    """Open the data of a config, take one split, and compute which bytes make up which row.

    Args:
      config: the data.
      split: the part to read.
      mode: "train" for endless shuffled batches; "eval" for one pass that scores every target byte once.
      source: documents to use instead of those that the config names; `soft_mask="upper"` raises them too.
      process_index: this process.
      process_count: processes that share each batch.

    Raises:
      TypeError: the config or the source is of another kind.
      FileNotFoundError: a path names no file.
      ValueError: bad data, an unknown split or sample, a split without bytes, a setting that nothing reads, or windows
        longer than every document.
      ValueError: the processes cannot share a batch equally.
    """
    fix = "make one, such as DataConfig(paths=('*.txt',))"
    check_kind("config", config, DataConfig, TaskDataConfig, LabelledDataConfig, fix=fix)
    if source is not None:
        check_kind("source", source, DocumentSource, fix="open one, such as TextSource('*.txt')")
    if mode not in ("train", "eval"):
        raise ValueError(f"unknown mode {mode!r}: choose 'train' or 'eval'")
    if not 0 <= process_index < process_count or config.batch_size % process_count:
        raise ValueError(
            f"batch_size = {config.batch_size} must be a multiple of process_count = {process_count}, and "
            f"process_index = {process_index} one of 0..{process_count - 1}"
        )
    processes: dict[str, Any] = {"process_index": process_index, "process_count": process_count}
    if isinstance(config, TaskDataConfig):
        if source is not None:
            raise ValueError(f"documents were given to the task {config.task!r}: a task brings its own rows")
        return open_task(config, split=split, mode=mode, **processes)
    if isinstance(config, LabelledDataConfig):
        if source is not None:
            raise ValueError(
                f"documents were given beside the labelled records of {config.paths}: leave them out"
            )
        return open_labelled(config, split=split, mode=mode, **processes)
    if source is not None:
        source = letters_of(config).open(source)
        config = replace(config, sources=())
    check_settings(config)
    whole = open_source(config) if source is None else source
    part = apply_split(config, whole, split)
    lists = _indexes_of_each(config, part, mode, split)
    # Make a bucket of each source in evaluation, so that a batch is of one source.
    together = zip(*lists, strict=True) if mode == "train" and config.sources else lists
    indexes = tuple(_joined(rows) for rows in together) if config.sources else tuple(lists[0])
    sizes = tuple(config.rows_of(index.row_length) for index in indexes)
    return DocumentDataset(
        config=config,
        mode=mode,
        schedule=_schedule(config, mode, lists, sizes),
        source_names=tuple(own.name for own in config.sources) if mode == "eval" else (),
        **processes,
        entropies=None if config.entropies is None else read_entropies(config.entropies, whole),
        source=part,
        indexes=indexes,
    )


Rows = Sequence[RowIndex]
"""The rows of one source: a list for each stage or bucket."""


def _schedule(
    config: DataConfig, mode: str, lists: Sequence[Rows], sizes: tuple[int, ...]
) -> Shuffled | Mixed | Staged | OnePass:
    if mode == "eval":
        return OnePass(tuple(len(index) for rows in lists for index in rows), sizes)
    if config.sources:
        weights = tuple(own.weight for own in config.sources)
        of_stage = [tuple(len(index) for index in stage) for stage in zip(*lists, strict=True)]
        stages = [Mixed(n, weights, size, config.seed) for n, size in zip(of_stage, sizes, strict=True)]
    else:
        rows = tuple(len(index) for index in lists[0])
        if not config.length_schedule:
            return Shuffled(rows, sizes, config.seed)
        stages = [Shuffled((n,), size, config.seed) for n, size in zip(rows, sizes, strict=True)]
    begins = (0, *(step for step, _ in config.length_schedule))
    return Staged(tuple(stages), begins) if config.length_schedule else stages[0]


def _joined(rows: Sequence[Any]) -> JoinedRows:
    """Join the rows of all sources in a stage, or take those of one source."""
    indexes = tuple(index for own in rows for index in own.indexes)
    return JoinedRows(indexes, tuple(shift for own in rows for shift in own.documents))


def _indexes_of_each(config: DataConfig, part: Regions, mode: str, split: str) -> list[Rows]:
    """Return the rows of each source.

    Their documents lie in `part`, one source after the other.
    """
    ends = document_ends(part)
    if not config.sources:
        pairs = pair_counts(part.lengths, ends, eos=config.ends_with_eos)
        return [_filled(config, pairs, mode, split)]
    assert isinstance(part.source, JoinedSource)
    edges = np.searchsorted(part.documents, part.source.firsts).tolist()
    lists: list[Rows] = []
    for source, (first, last) in zip(config.sources, pairwise(edges), strict=True):
        own = config.of(source)
        pairs = pair_counts(part.lengths[first:last], ends[first:last], eos=own.ends_with_eos)
        try:
            found = _filled(own, pairs, mode, split)
        except ValueError as error:
            raise ValueError(f"source {source.name!r}: {error}") from error
        lists.append([JoinedRows((index,), (first,)) for index in found])
    return lists


def _filled(config: DataConfig, pairs: np.ndarray, mode: str, split: str) -> Rows:
    """Return the row lists of one source that hold a row."""
    indexes = [index for index in _indexes(config, pairs, mode, split) if len(index)]
    if not indexes:
        raise ValueError(
            f"split {split!r} holds no byte: check the data, or change fractions {config.fractions}"
        )
    return indexes


def _indexes(config: DataConfig, pairs: np.ndarray, mode: str, split: str) -> Sequence[RowIndex]:
    options: dict[str, Any] = {"alignment": config.alignment, "long_documents": config.long_documents}
    if config.packing == "windows":
        lengths = [length for _, length in config.length_schedule] if mode == "train" else []
        stages = [replace(config, seq_len=length, length_schedule=()) for length in lengths]
        return [_windows(stage, pairs, mode, split) for stage in (*stages, config)]
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
