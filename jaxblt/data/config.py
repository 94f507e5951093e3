"""The data that a run reads and their cut into rows, as one frozen config."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxblt.data.buckets import rows_within
from jaxblt.data.mixture import JoinedSource, Kind, SourceConfig
from jaxblt.data.samples import SAMPLES, sample_source
from jaxblt.data.sources import (
    ArrowSource,
    DocumentSource,
    FastaSource,
    JsonlSource,
    Regions,
    TextSource,
    open_bed,
)
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.labelled import FASTA, FASTQ, GENBANK, ending
from jaxblt.data.splits import SplitName, split_by_document, split_by_name, split_by_position
from jaxblt.data.vocab import check_single_bytes
from jaxblt.show import show
from jaxblt.validation import MOST_SEED, check_bounds, check_fields, check_read


class KindWarning(UserWarning):
    """A file is read as text, and its name ends as those of JSON lines, FASTA, FASTQ or GenBank do."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data of a run: exactly one of `paths`, `sample` and `sources`, or a source handed to `make_dataset`.

    Attributes:
      paths: files, globs and URLs; plain files are read where they lie, compressed ones are held in memory. For "arrow"
        also folders that `datasets` saved to disk.
      sample: the name of an embedded sample, in place of `paths`.
      sources: several sources with weights, in place of `paths`. Each row is of one source, which seed, step and slot
        choose. Each source is split and scored by itself.
      kind: how the files are read: as "text"; "jsonl", JSON lines; "fasta"; "arrow", Parquet or Arrow; or "bytes", as
        they lie. A sample knows its own.
      field: the field of JSON lines, or the column of Parquet and Arrow, that holds the text.
      bed: for FASTA, a BED file whose intervals become the documents (padded with N out of bounds).
      soft_mask: for FASTA, "keep" lower-case bases or "upper" them.
      seq_len: positions in a row (T).
      batch_size: rows in a batch, over all processes.
      packing: "windows" over each document; documents packed "first_fit" (decreasing) or "sequential"; or
        "buckets": one document a row, in rows of the lengths `buckets` and `seq_len`.
      stride: for windows, positions from the start of one to that of the next; None is seq_len.
      partial: for windows, "keep" or "drop" the last one of a document when it is not full.
      length_schedule: for windows, in training: rising pairs (step, length). Rows have `length` positions before `step`
        and `seq_len` from the last step on. A batch of shorter rows has more of them, so that it has as many positions.
      context: for windows, in evaluation: pairs that precede the scored ones wherever there are as many.
      alignment: packed documents start at multiples of it; a recipe raises it to a multiple of its patcher's block.
      buckets: row lengths of the buckets below `seq_len`, which takes the overflow.
      max_tokens: for buckets, the most positions of a batch: one of longer rows has fewer of them. None sets no limit.
      long_documents: packed or bucketed documents longer than a row are "split" into chunks, or an "error".
      eos: whether EOS is the last target of a document that really ends; None is True except for FASTA.
      scored: score only targets among these characters, such as "ACGT"; None scores all.
      reverse_complement: in training, a document in a row is read from the other strand with probability 1/2.
      split: what the parts are made of: whole "documents", the same share of every document by "position", or
        documents chosen by "names".
      fractions: the shares of train, validation and test.
      split_seed: deals documents to the parts; apart from `seed`, which then changes no part.
      validation_names, test_names: for "names", patterns of document names (a file's path, a FASTA record).
      entropies: a `.npy` file of precomputed entropies of the whole source (see `write_entropies`).
      seed: picks the order of rows and the strands.

    Raises:
      ValueError: an option is out of range, or two do not go together.
    """

    paths: tuple[str, ...] = ()
    sample: str | None = None
    sources: tuple[SourceConfig, ...] = ()
    kind: Kind = "text"
    field: str = "text"
    bed: str | None = None
    soft_mask: Literal["keep", "upper"] = "keep"
    seq_len: int = 4096
    batch_size: int = 8
    packing: Literal["windows", "first_fit", "sequential", "buckets"] = "windows"
    stride: int | None = None
    partial: Literal["keep", "drop"] = "keep"
    length_schedule: tuple[tuple[int, int], ...] = ()
    context: int = 0
    alignment: int = 1
    buckets: tuple[int, ...] = ()
    max_tokens: int | None = None
    long_documents: Literal["split", "error"] = "split"
    eos: bool | None = None
    scored: str | None = None
    reverse_complement: bool = False
    split: Literal["documents", "position", "names"] = "position"
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = 0
    validation_names: tuple[str, ...] = ()
    test_names: tuple[str, ...] = ()
    entropies: str | None = None
    seed: int = 0

    __repr__ = show

    def __post_init__(self) -> None:
        if isinstance(self.paths, str | os.PathLike):
            raise ValueError(
                f"paths must be a tuple of paths, got {self.paths!r}: write ({str(self.paths)!r},)"
            )
        check_fields(self)
        check_bounds(self, "seq_len", "batch_size", "alignment", least=1)
        check_bounds(self, "stride", "buckets", least=1)
        check_bounds(self, "max_tokens", least=self.seq_len, why=": a row of seq_len must fit")
        check_bounds(self, "context", least=0, below="seq_len")
        check_bounds(self, "seed", "split_seed", least=0, most=MOST_SEED)
        check_bounds(self, "fractions", least=0, most=1)
        if abs(sum(self.fractions) - 1) > 1e-6:
            raise ValueError(f"DataConfig.fractions must sum to 1, got {self.fractions}")
        if self.sample is not None and self.sample not in SAMPLES:
            raise ValueError(f"unknown sample {self.sample!r}: choose one of {', '.join(map(repr, SAMPLES))}")
        self._check_sources()
        self._check_pairs_of_options()

    def _check_sources(self) -> None:
        if not self.sources:
            return
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"DataConfig.sources must have names of their own, got {', '.join(names)}")
        if self.paths or self.sample is not None or self.bed is not None:
            raise ValueError(
                f"DataConfig.sources name the documents, got paths={self.paths!r}, sample={self.sample!r} and "
                f"bed={self.bed!r} besides: leave these to the sources"
            )
        if self.packing == "buckets":
            raise ValueError(
                "DataConfig.sources need rows of one length, got packing='buckets': use 'first_fit' or 'windows'"
            )
        for source in self.sources:
            self.of(source)

    def of(self, source: SourceConfig) -> "DataConfig":
        """Return the config of one source by itself."""
        own = {f.name: getattr(source, f.name) for f in fields(source) if f.name not in ("name", "weight")}
        return replace(self, sources=(), **own)

    def _check_pairs_of_options(self) -> None:
        if self.packing != "windows" and (self.stride is not None or self.context):
            raise ValueError(
                f"stride and context are of packing='windows', got {self.stride} and {self.context} with "
                f"packing={self.packing!r}"
            )
        self._check_length_schedule()
        if self.split != "names" and (self.validation_names or self.test_names):
            raise ValueError(f"validation_names and test_names need split='names', got split={self.split!r}")
        if self.buckets and self.packing != "buckets":
            raise ValueError(f"buckets {self.buckets} need packing='buckets', got packing={self.packing!r}")
        if self.max_tokens is not None and self.packing != "buckets":
            raise ValueError(
                f"max_tokens {self.max_tokens} needs packing='buckets', got packing={self.packing!r}"
            )
        if self.bed is not None and self.sample_or_kind != "fasta":
            raise ValueError(f"bed={self.bed!r} needs kind='fasta', got {self.sample_or_kind!r}")
        if self.reverse_complement and self.ends_with_eos:
            raise ValueError("reverse_complement needs eos=False: a strand has no end that is its last byte")
        if self.reverse_complement and self.entropies is not None:
            raise ValueError(
                f"entropies={self.entropies!r} are of one strand: compute them in the step, or turn "
                "reverse_complement off"
            )

    def _check_length_schedule(self) -> None:
        if not self.length_schedule:
            return
        if self.packing != "windows" or self.stride is not None:
            raise ValueError(
                f"length_schedule {self.length_schedule} needs packing='windows' without stride, got "
                f"packing={self.packing!r} and stride={self.stride}"
            )
        steps, lengths = zip(*self.length_schedule, strict=True)
        if not all(a < b for pair in (steps, lengths) for a, b in pairwise((0, *pair))):
            raise ValueError(
                f"steps and lengths of length_schedule must rise from above 0, got {self.length_schedule}"
            )
        if lengths[-1] >= self.seq_len or any(self.seq_len % length for length in lengths):
            raise ValueError(
                f"lengths of length_schedule must divide seq_len = {self.seq_len} and lie below it, got "
                f"{self.length_schedule}"
            )

    def rows_of(self, row_length: int) -> int:
        """Return the number of rows in a batch of rows of this length."""
        most = self.batch_size * self.seq_len // row_length if self.length_schedule else self.batch_size
        return rows_within(row_length, most_rows=most, max_tokens=self.max_tokens)

    @property
    def sample_or_kind(self) -> str:
        """The kind of the data: that of the sample, that which all sources share ("text" if they differ), else
        `kind`."""
        shared = {self.of(source).sample_or_kind for source in self.sources}
        if shared:
            return shared.pop() if len(shared) == 1 else "text"
        return SAMPLES[self.sample].kind if self.sample in SAMPLES else self.kind

    @property
    def ends_with_eos(self) -> bool:
        return self.sample_or_kind != "fasta" if self.eos is None else self.eos


def check_settings(config: DataConfig) -> None:
    """Raise ValueError for settings of rows or splits that would have no effect.

    A config itself may hold such settings: else runs that were trained with them could not be read.
    """
    check_single_bytes("data.scored", config.scored or "")
    packed = config.packing != "windows"
    packings = "packing='first_fit', 'sequential' or 'buckets'"
    reads = {
        "long_documents": (packed, packings),
        "partial": (not packed, "packing='windows'"),
        "split_seed": (config.split == "documents", "split='documents'"),
        "fractions": (config.split != "names", "split='documents' or 'position'"),
        "validation_names": (not config.sources, "validation_names of each source"),
        "test_names": (not config.sources, "test_names of each source"),
    }
    for name, (is_read, needed) in reads.items():
        check_read(config, name, needed=needed, is_read=is_read, part="data")
    _check_shared(config)


def _check_shared(config: DataConfig) -> None:
    """Raise ValueError for a file that one source trains on and another holds out."""
    if config.split == "position":
        return
    held: dict[str, tuple[str, Any]] = {}
    for source in config.sources:
        files = [os.path.abspath(file) for file in expand(source.paths)] if source.paths else []
        # Compare names only by "names": they deal a document then, whatever lies beside it. By "documents" the files
        # do.
        names = (source.validation_names, source.test_names)
        own = names if config.split == "names" else (files, source.kind, source.bed)
        for file in files:
            other, dealt = held.setdefault(file, (source.name, own))
            if dealt != own:
                raise ValueError(
                    f"{file!r} is of source {other!r} and of {source.name!r}, whose documents are split in different "
                    "ways: one may train on what the other holds out; give both the same "
                    f"{'names' if config.split == 'names' else 'files, kind and bed'}, or split='position'"
                )


def _warn_kind(names: Sequence[str]) -> None:
    """Warn of a file read as text whose name says otherwise: its markup would be learned."""
    for name in names:
        end = ending(Path(name))
        if end in (".jsonl", *FASTA):
            fix = f"set data.kind={'jsonl' if end == '.jsonl' else 'fasta'!r} to read its records"
        elif end in (*FASTQ, *GENBANK):
            fix = "write its sequences as FASTA, and set data.kind='fasta'"
        else:
            continue
        _warn_once(f"{name!r} is read as text, its markup included: {fix}")
        return


@cache
def _warn_once(said: str) -> None:
    """Warn once, whichever split is opened: Python would warn again after a change of its filters of warnings."""
    warnings.warn(said, KindWarning, stacklevel=4)


def open_source(config: DataConfig) -> DocumentSource:
    """Open the whole documents that a config names, before any split.

    Raises:
      ValueError: not exactly one of `paths`, `sample` and `sources`; a setting that nothing reads; bad data.
      FileNotFoundError: a path names no file.

    Warns:
      KindWarning: a file that is read as text has the name of another kind.
    """
    for name, kinds in (("field", ("jsonl", "arrow")), ("soft_mask", ("fasta",))):
        owns = not config.sources and config.sample_or_kind in kinds
        needed = " or ".join(f"kind={kind!r}" for kind in kinds) + " of a source" * bool(config.sources)
        check_read(config, name, needed=needed, is_read=owns, part="data")
    if config.sources:
        return JoinedSource(tuple(open_source(config.of(source)) for source in config.sources))
    if bool(config.paths) == (config.sample is not None):
        raise ValueError(
            f"give either paths or sample, got paths={config.paths!r} and sample={config.sample!r}; or sources"
        )
    if config.sample is not None:
        source = sample_source(config.sample)
    elif config.kind in ("text", "bytes"):
        source = TextSource(config.paths, raw=config.kind == "bytes")
        if config.kind == "text":
            _warn_kind(source.names)
    elif config.kind == "arrow":
        source = ArrowSource(config.paths, field=config.field)
    elif config.kind == "jsonl":
        source = JsonlSource(config.paths, field=config.field)
    else:
        source = FastaSource(config.paths, soft_mask=config.soft_mask)
    return source if config.bed is None else open_bed(source, config.bed)


def apply_split(config: DataConfig, source: DocumentSource, split: SplitName) -> Regions:
    """Return the part of `source` that `split` names, by the rule of `config`.

    Each of several sources is split by itself.
    """
    if config.sources and isinstance(source, JoinedSource):
        return _split_each(config, source, split)
    if config.split == "documents":
        return split_by_document(source, split, fractions=config.fractions, seed=config.split_seed)
    if config.split == "position":
        return split_by_position(source, split, fractions=config.fractions)
    return split_by_name(source, split, validation=config.validation_names, test=config.test_names)


def _split_each(config: DataConfig, joined: JoinedSource, split: SplitName) -> Regions:
    """Split each source and return the parts one after the other."""
    parts = []
    for own, source in zip(config.sources, joined.sources, strict=True):
        try:
            parts.append(apply_split(config.of(own), source, split))
        except ValueError as error:
            raise ValueError(f"source {own.name!r}: {error}") from error
    shifted = [part.documents + first for part, first in zip(parts, joined.firsts, strict=False)]
    starts, stops = (np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "stops"))
    return Regions(joined, np.concatenate(shifted), starts, stops)
