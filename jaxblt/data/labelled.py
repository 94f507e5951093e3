"""Labelled sequences as data: one record a row, with a class, a number, or a class for each byte."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.buckets import bucket, rows_within
from jaxblt.data.dataset import Dataset, Row
from jaxblt.data.deal import deal_records
from jaxblt.data.label_tasks import (
    UNLABELLED,
    LabelTask,
    as_class,
    as_number,
    check_head,
    check_task_names,
    describe_tasks,
    settle_tasks,
    task_labels,
    task_targets,
)
from jaxblt.data.packing import PackedIndex
from jaxblt.data.permutation import hash64
from jaxblt.data.rows import Span, stream_ids, write_span
from jaxblt.data.sampled import sample_bytes
from jaxblt.data.schedule import STRANDS, EasyFirst, OnePass, Shuffled
from jaxblt.data.sources import BytesSource, FastaSource, ReverseComplement
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.labelled import (
    FASTA,
    Columns,
    LabelledRecord,
    ending,
    read_label_table,
    read_labelled,
)
from jaxblt.data.splits import PARTS, SplitName, check_split, cut_points
from jaxblt.show import show
from jaxblt.validation import MOST_SEED, check_bounds, check_fields, check_read

Target = Literal["class", "number", "positions"]
OPENED = 2
"""Sets of records that stay in memory, so that classes and three splits read unchanged files once."""


@dataclass(frozen=True, kw_only=True)
class LabelledDataConfig:
    """Labelled records, one a row; stands where a `DataConfig` does.

    A row is BOS and the record's bytes, as in training on whole documents. Files are known by their endings: tables
    (.csv, .tsv), JSON lines (.jsonl), Parquet and Arrow (.parquet, .arrow, .feather, folders that `datasets` saved),
    FASTA and BED. FASTA needs a table of `labels`. BED intervals need a `genome`, and their fourth column is the label.
    Text may be compressed.

    Attributes:
      paths: files and globs of records.
      labels: for FASTA, a .tsv or .csv table of id and label; its first row may name the columns.
      genome: for BED, the FASTA file that intervals are parts of.
      sequence, label, id: columns of tables, Parquet and Arrow, and fields of JSON lines. A record without `id` is
        called "file:line".
      target: what a label is: a "class" of the record; a "number"; or for "positions" one character for each byte.
      classes: their names, which give classes their numbers; `with_classes` collects and sorts those of the files.
      soft_mask: "keep" lower-case letters of sequences or "upper" them; None keeps them, or in fine-tuning does as the
        base run.
      reverse_complement: in training, a record of DNA is read from the other strand with probability 1/2, and labels of
        positions are reversed with it. Use it only if labels do not depend on the strand.
      seq_len: positions in a row (T); the longest record and BOS must fit.
      batch_size: rows in a batch, over all processes.
      buckets: lengths of shorter rows.
      max_tokens: the most positions of a batch; one of longer rows has fewer of them. None sets no limit.
      split: "hash" deals records by a hash of their sequence, so that equal sequences lie in one part. "groups" deals
        groups of near-copies (`jaxblt.data.deal`), so that none lies in two. "column" reads `split_column`. "files"
        trains on `paths`, and holds out `validation_paths` and `test_paths`.
      split_column: of tables, JSON lines and tables of labels: "train", "validation" or "test".
      validation_paths, test_paths: files of the other parts, for "files".
      fractions: the shares of train, validation and test, for "hash" and "groups". Groups are dealt so that the parts
        come as near to their shares, of each class too, as groups allow.
      split_seed: of the hash, and of the order in which groups are dealt.
      group_k: letters of the words that near-copies share, for "groups"; None takes 21 for DNA on both strands, 5 for
        proteins and 16 for text.
      group_share: two records are near-copies if they share this share of the words of the one that has fewer.
      tasks: columns of labels instead of `label`, each a task with a head of its own; cells may be empty. Each
        `LabelTask` has a column, target and classes of its own, instead of `label`, `target` and `classes`.
      easy_first: steps of a curriculum that begins with the easiest records and ends with all (`EasyFirst`); 0 for
        none. It needs rows of one length.
      difficulty: column of numbers that are larger for harder records, for `easy_first`; None takes the length.
      seed: picks the order of rows and the strands.

    Raises:
      ValueError: an option is out of range, or two do not go together.
    """

    paths: tuple[str, ...]
    labels: str | None = None
    genome: str | None = None
    sequence: str = "sequence"
    label: str = "label"
    id: str = "id"
    target: Target = "class"
    classes: tuple[str, ...] = ()
    soft_mask: Literal["keep", "upper"] | None = None
    reverse_complement: bool = False
    seq_len: int = 1024
    batch_size: int = 32
    buckets: tuple[int, ...] = ()
    max_tokens: int | None = None
    split: Literal["hash", "groups", "column", "files"] = "hash"
    split_column: str = "split"
    validation_paths: tuple[str, ...] = ()
    test_paths: tuple[str, ...] = ()
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = 0
    group_k: int | None = None
    group_share: float = 0.5
    easy_first: int = 0
    seed: int = 0
    tasks: tuple[LabelTask, ...] = ()
    difficulty: str | None = None

    __repr__ = show

    packing = "buckets"  # one record a row, with padding behind it
    alignment = 1
    entropies = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.paths:
            raise ValueError("LabelledDataConfig.paths is (): name at least one file of labelled records")
        check_bounds(self, "seq_len", "batch_size", "buckets", least=1)
        check_bounds(self, "max_tokens", least=self.seq_len, why=": a row of seq_len must fit")
        check_bounds(self, "seed", "split_seed", least=0, most=MOST_SEED)
        check_bounds(self, "easy_first", least=0, why=": 0 orders nothing by length")
        if self.easy_first and self.buckets:
            raise ValueError(
                f"easy_first = {self.easy_first} needs rows of one length, got buckets {self.buckets}: leave one out"
            )
        check_bounds(self, "fractions", least=0, most=1)
        check_bounds(self, "group_k", least=1)
        check_bounds(self, "group_share", above=0, most=1)
        if abs(sum(self.fractions) - 1) > 1e-6:
            raise ValueError(f"LabelledDataConfig.fractions must sum to 1, got {self.fractions}")
        if len(set(self.classes)) != len(self.classes) or "" in self.classes:
            raise ValueError(f"LabelledDataConfig.classes must be different names, got {self.classes}")
        if self.target == "number" and self.classes:
            raise ValueError(f"classes {self.classes} are not of target='number': leave one of them out")
        self._check_tasks()
        if self.difficulty is not None and not self.easy_first:
            raise ValueError(
                f"difficulty = {self.difficulty!r} orders records for easy_first, which is 0: set it to a number of "
                "steps, or leave difficulty out"
            )
        if self.split != "files" and (self.validation_paths or self.test_paths):
            held = self.validation_paths + self.test_paths
            raise ValueError(f"validation_paths and test_paths {held} need split='files', got {self.split!r}")

    def check(self, recipe: Any) -> None:
        """Check that the heads of a recipe's model answer with the labels that records have."""
        check_task_names(recipe)
        head = getattr(recipe.model, "head", None)
        if not self.tasks:
            check_head(head, self)
            return
        heads = {task.name: task.head for task in getattr(head, "tasks", ())}
        for task in self.tasks:
            check_head(heads[task.column], task, task.column)

    def _check_tasks(self) -> None:
        columns = [task.column for task in self.tasks]
        if doubled := [name for name in columns if columns.count(name) > 1]:
            raise ValueError(f"column {doubled[0]!r} is two tasks: name each column once")
        if columns and (self.label, self.target, self.classes) != ("label", "class", ()):
            raise ValueError(
                f"label = {self.label!r}, target = {self.target!r} and classes = {self.classes} are of one task, and "
                f"tasks are {', '.join(columns)}: say it of each task, and leave these out"
            )

    def rows_of(self, row_length: int) -> int:
        """Return the number of rows in a batch of rows of this length."""
        return rows_within(row_length, most_rows=self.batch_size, max_tokens=self.max_tokens)

    @property
    def columns(self) -> Columns:
        """The names of the files' columns."""
        part = self.split_column if self.split == "column" else None
        labels = tuple(task.column for task in self.tasks) or (self.label,)
        return Columns(self.sequence, labels, self.id, part, self.difficulty, optional=bool(self.tasks))

    @property
    def num_classes(self) -> int | None:
        """Classes of the one task; None of several, of numbers, and while classes are to be collected."""
        return len(self.classes) or None

    @property
    def is_open(self) -> bool:
        """True while classes are still to be collected from the files."""
        if self.tasks:
            return any(task.is_open for task in self.tasks)
        return self.target != "number" and not self.classes


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LabelledDataset(Dataset):
    """Rows of one record each, with labels.

    Attributes:
      records: of the split.
      source: their sequences.
      targets: what their labels mean, see `read_targets`; of several tasks see `task_targets`.
      indexes: which record a row of each bucket holds.
    """

    config: LabelledDataConfig
    records: Sequence[LabelledRecord]
    source: BytesSource
    targets: Sequence[Any] | Mapping[str, np.ndarray]
    indexes: tuple[PackedIndex, ...]

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return tuple(index.row_length for index in self.indexes)

    @property
    def num_rows(self) -> int:
        return len(self.records)

    @property
    def num_bytes(self) -> int:
        return int(self.source.lengths.sum())

    def sample(self) -> Iterator[bytes]:
        yield from sample_bytes(self.source)
        yield repr([record.labels for record in self.records]).encode()

    def fill_row(self, row: Row, bucket: int, number: int, step: int, slot: int) -> None:
        record = int(self.indexes[bucket].documents[number])
        span = Span(record, 0, int(self.source.lengths[record]) + 1, 0, 0)
        source = ReverseComplement(self.source) if self._flips(step, slot) else self.source
        write_span(row, stream_ids(source, record, span.start, span.stop), span, 1)

    def _flips(self, step: int, slot: int) -> bool:
        wanted = self.config.reverse_complement and self.mode == "train"
        return wanted and hash64(self.config.seed, STRANDS, step, slot, 0) % 2 == 1

    def record_numbers(self, step: int, slots: Sequence[int] | None = None) -> np.ndarray:
        """Return Int64[slots], the record in each of this process's rows, or in `slots`.

        -1 is an empty row.
        """
        slots = self.slots(step) if slots is None else slots
        index = self.indexes[self.schedule.place(step).bucket]
        numbers = self.row_numbers(step, slots)
        return np.array([-1 if n is None else index.documents[n] for n in numbers], np.int64)

    def batch(self, step: int, *, slots: Sequence[int] | None = None) -> Batch:
        slots = self.slots(step) if slots is None else slots
        made = super().batch(step, slots=slots)
        numbers = self.record_numbers(step, slots)
        if isinstance(self.targets, Mapping):
            return replace(made, labels=task_labels(self.targets, numbers))
        if self.config.target != "positions":
            kind = np.float32 if self.config.target == "number" else np.int32
            return replace(made, labels=np.array([0 if n < 0 else self.targets[n] for n in numbers], kind))
        labels = np.full(made.inputs.shape, UNLABELLED, np.int32)
        for row, number, slot in zip(labels, numbers, slots, strict=True):
            if number >= 0:
                target = self.targets[number]
                row[1 : 1 + len(target)] = target[::-1] if self._flips(step, slot) else target
        return replace(made, labels=labels)


def with_classes(config: LabelledDataConfig) -> LabelledDataConfig:
    """Return `config` with the names of its classes, sorted as text, if they are still open.

    All splits are read.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: bad data, fewer than two classes, or a task without a label to train on.
    """
    if config.tasks:
        return replace(config, tasks=settle_tasks(config.tasks, read_parts(config)))
    if not config.is_open:
        return config
    labels = {record.label for part in read_parts(config).values() for record in part}
    if config.target == "positions":
        labels = set("".join(labels))
    if len(labels) < 2:
        raise ValueError(
            f"the labels of {config.paths} name one class, {sorted(labels)}: a model can only tell two or more apart"
        )
    return replace(config, classes=tuple(sorted(labels)))


def fitting_length(config: LabelledDataConfig, multiple: int = 64) -> int:
    """Return the shortest multiple as `seq_len` that holds every record behind BOS.

    Raises:
      ValueError: there is no record.
    """
    lengths = [len(record.sequence) for part in read_parts(config).values() for record in part]
    if not lengths:
        raise ValueError(f"{config.paths} hold no labelled record: give files with at least one for training")
    longest = max(lengths)
    return -(-(longest + 1) // multiple) * multiple


def number_statistics(config: LabelledDataConfig, task: LabelTask | None = None) -> tuple[float, float]:
    """Return mean and standard deviation of the training labels of target="number".

    The deviation is 1 for numbers that are all the same. Of several tasks they are those of `task`, without empty
    cells.
    """
    place = 0 if task is None else config.tasks.index(task)
    labels = [(record.labels[place], record) for record in read_parts(config)["train"]]
    numbers = np.array([as_number(label, record) for label, record in labels if label], np.float64)
    return float(numbers.mean()), float(numbers.std()) or 1.0


def classes_of(data: Any, task: str) -> tuple[str, ...]:
    """Return the class names of labelled data, or of one of its tasks; () where there are none."""
    named = {one.column: one.classes for one in getattr(data, "tasks", ())}
    return named[task] if task else getattr(data, "classes", ())


def check_labels(own: LabelledDataConfig, other: LabelledDataConfig) -> None:
    """Raise ValueError for data whose labels differ in meaning or number from a run's."""
    for name in ("target", "classes", "tasks"):
        learned, given = getattr(own, name), getattr(other, name)
        if given != learned:
            raise ValueError(
                f"the run learned labels of {name} = {learned}, and the data's are of {name} = {given}: make them by "
                "dataclasses.replace(run.recipe.data, paths=...), which keeps the numbers of classes"
            )


def label_lines(config: LabelledDataConfig) -> list[str]:
    """Return lines that say what was read: labels of tasks, sizes of parts, unseen classes."""
    parts = read_parts(config)
    lines = describe_tasks(config.tasks, parts) if config.tasks else []
    if config.split == "groups":
        sizes = ", ".join(f"{len(records)} {part}" for part, records in parts.items())
        lines.append(f"data.split = 'groups' deals whole groups of near-copies: {sizes} records")
    for place, asked in enumerate(config.tasks or (config,)):
        held = {record.labels[place] for record in parts["train"]}
        known = set("".join(held)) if asked.target == "positions" else held
        if missing := [name for name in asked.classes if name not in known]:
            whose = f" of task {asked.column}" if isinstance(asked, LabelTask) else ""
            lines.append(
                f"classes{whose} that no training record has, so that none is learned: {', '.join(missing)}"
            )
    return lines


def open_labelled(
    config: LabelledDataConfig,
    *,
    split: SplitName,
    mode: Literal["train", "eval"],
    process_index: int = 0,
    process_count: int = 1,
) -> LabelledDataset:
    """Open one split of labelled records.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: bad data, an unknown or empty split, classes that are still open, or a record longer than a row.
    """
    check_split(split)
    if config.is_open:
        raise ValueError("the classes of the labelled data are open: use jaxblt.data.with_classes(config)")
    parts = read_parts(config)
    records = [r for part in PARTS for r in parts[part]] if split == "all" else parts[split]
    if not records:
        raise ValueError(
            f"split {split!r} gets none of {sum(map(len, parts.values()))} records: change fractions = "
            f"{config.fractions}, or split by 'column' or 'files'"
        )
    _check_lengths(config, records)
    source = BytesSource([r.sequence for r in records], [r.name for r in records])
    indexes = tuple(bucket(source.lengths + 1, config.buckets, config.seq_len, long_documents="error"))
    rows = tuple(len(index) for index in indexes)
    sizes = tuple(config.rows_of(index.row_length) for index in indexes)
    return LabelledDataset(
        config=config,
        mode=mode,
        schedule=_training_order(config, indexes, records) if mode == "train" else OnePass(rows, sizes),
        process_index=process_index,
        process_count=process_count,
        records=records,
        source=source,
        targets=task_targets(config.tasks, records) if config.tasks else read_targets(config, records),
        indexes=indexes,
    )


def _training_order(
    config: LabelledDataConfig, indexes: tuple[PackedIndex, ...], records: Sequence[LabelledRecord]
) -> Shuffled | EasyFirst:
    rows = tuple(len(index) for index in indexes)
    sizes = tuple(config.rows_of(index.row_length) for index in indexes)
    shuffled = Shuffled(rows, sizes, config.seed)
    if not config.easy_first:
        return shuffled
    hard = np.array([_difficulty(config, record) for record in records])
    order = np.argsort(hard[indexes[0].documents], kind="stable")
    return EasyFirst(tuple(order.tolist()), sizes[0], config.easy_first, shuffled, config.seed)


def _difficulty(config: LabelledDataConfig, record: LabelledRecord) -> float:
    """Return a record's length, or what the column of difficulties says."""
    if config.difficulty is None:
        return len(record.sequence)
    try:
        return as_number(record.difficulty or "", record)
    except ValueError as error:
        raise ValueError(
            f"{record.place}: {config.difficulty} of {record.name!r} is {record.difficulty!r}, expected a finite "
            "number: larger for harder records"
        ) from error


def read_targets(config: LabelledDataConfig, records: Sequence[LabelledRecord]) -> list[Any]:
    """Return what labels mean: class numbers, numbers, or Int32[bytes] of classes of positions.

    Raises:
      ValueError: a label is no class, no finite number, or has not one character for each byte; names file and line.
    """
    if config.target == "number":
        return [as_number(record.label, record) for record in records]
    numbers = {name: i for i, name in enumerate(config.classes)}
    if config.target == "class":
        return [as_class(record.label, record, numbers) for record in records]
    for record in records:
        if len(record.label) != len(record.sequence):
            raise ValueError(
                f"{record.place}: the label of {record.name!r} has {len(record.label)} characters for "
                f"{len(record.sequence)} bytes, expected one for each"
            )
    return [np.array([as_class(c, r, numbers) for c in r.label], np.int32) for r in records]


def _check_lengths(config: LabelledDataConfig, records: Sequence[LabelledRecord]) -> None:
    for record in records:
        if len(record.sequence) + 1 > config.seq_len:
            raise ValueError(
                f"{record.place}: record {record.name!r} has {len(record.sequence)} bytes, which do not fit behind BOS "
                f"in rows of data.seq_len = {config.seq_len}: raise it to {len(record.sequence) + 1}, or cut the record"
            )


def read_parts(config: LabelledDataConfig) -> dict[str, list[LabelledRecord]]:
    """Read the records of each split, in the order of the files.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: a bad row, which is named by file and line.
    """
    options = {
        "classes": (),
        "tasks": tuple(replace(task, classes=()) for task in config.tasks),
        "reverse_complement": False,
        "seq_len": 1,
        "batch_size": 1,
        "buckets": (),
        "max_tokens": None,
        "seed": 0,
    }
    named = (*config.paths, *config.validation_paths, *config.test_paths, config.labels, config.genome)
    files = expand([path for path in named if path is not None])
    _check_apart(config)
    _check_settings(config, files)
    stamps = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _read_parts(replace(config, **options), stamps)


def _check_settings(config: LabelledDataConfig, files: Sequence[Path]) -> None:
    """Raise ValueError for a setting that nothing reads: it would have no effect."""
    read = {
        "split_column": (config.split == "column", "split='column'"),
        "split_seed": (config.split in ("hash", "groups"), "split='hash' or 'groups'"),
        "group_k": (config.split == "groups", "split='groups'"),
        "group_share": (config.split == "groups", "split='groups'"),
        "fractions": (config.split in ("hash", "groups"), "split='hash' or 'groups'"),
        "genome": (any(ending(file) == ".bed" for file in files), "a .bed file among the paths"),
    }
    for name, (is_read, needed) in read.items():
        check_read(config, name, needed=needed, is_read=is_read, part="data")


def _check_apart(config: LabelledDataConfig) -> None:
    """Raise ValueError for a file of two parts, as a glob easily names one that is held out."""
    found: dict[Path, str] = {}
    for name in ("paths", "validation_paths", "test_paths"):
        for file in expand(getattr(config, name)) if getattr(config, name) else ():
            other = found.setdefault(file.resolve(), name)
            if other != name:
                raise ValueError(
                    f"{str(file)!r} is named by {other} and by {name}, whose records no other part may hold: leave it "
                    "out of one"
                )


@lru_cache(maxsize=OPENED)
def _read_parts(config: LabelledDataConfig, stamps: tuple[Any, ...]) -> dict[str, list[LabelledRecord]]:
    paths = {"train": config.paths, "validation": config.validation_paths, "test": config.test_paths}
    read = {part: _read_files(config, files) for part, files in paths.items()}
    _check_ids(config, [record for records in read.values() for record in records])
    if config.split == "files":
        return read
    parts: dict[str, list[LabelledRecord]] = {part: [] for part in PARTS}
    for record, part in zip(read["train"], _parts_of(config, read["train"]), strict=True):
        parts[part].append(record)
    return parts


def _parts_of(config: LabelledDataConfig, records: list[LabelledRecord]) -> list[str]:
    if config.split == "hash":
        return [_hash_part(config, record) for record in records]
    if config.split == "column":
        return [_column_part(config, record) for record in records]
    targets = [task.target for task in config.tasks] or [config.target]
    named = [place for place, target in enumerate(targets) if target == "class"]
    dealt = deal_records(
        [record.sequence for record in records],
        [[record.labels[place] for place in named] for record in records],
        length=config.group_k,
        share=config.group_share,
        fractions=config.fractions,
        seed=config.split_seed,
    )
    return [PARTS[part] for part in dealt]


def _read_files(config: LabelledDataConfig, paths: tuple[str, ...]) -> list[LabelledRecord]:
    if not paths:
        return []
    genome = None if config.genome is None else FastaSource(config.genome)
    options = {"labels": config.labels, "genome": genome}
    records = [r for file in expand(paths) for r in read_labelled(file, config.columns, **options)]
    if config.soft_mask == "upper":
        records = [r._replace(sequence=r.sequence.upper()) for r in records]
    return records


def _check_ids(config: LabelledDataConfig, records: list[LabelledRecord]) -> None:
    """Raise ValueError if the table of labels names a record that no FASTA file holds."""
    if config.labels is None:
        return
    named = (*config.paths, *config.validation_paths, *config.test_paths)
    if not all(ending(file) in FASTA for file in expand(named)):
        raise ValueError(f"labels={config.labels!r} are of FASTA files, got {named}: leave one of them out")
    known = {record.name for record in records}
    for name, row in read_label_table(config.labels, config.columns).items():
        if name not in known:
            raise ValueError(
                f"{row.place}: id {name!r} is no record of {', '.join(named)}: check how it is written"
            )


def _hash_part(config: LabelledDataConfig, record: LabelledRecord) -> str:
    """Choose a part by a hash of the sequence.

    Records that are added or removed move no other.
    """
    key = config.split_seed.to_bytes(4, "little")
    digest = hashlib.blake2b(record.sequence, digest_size=4, key=key).digest()
    edges = cut_points(np.array([1 << 32]), config.fractions)[0, 1:3]
    return PARTS[int(np.searchsorted(edges, int.from_bytes(digest, "little"), side="right"))]


def _column_part(config: LabelledDataConfig, record: LabelledRecord) -> str:
    if record.part not in PARTS:
        raise ValueError(
            f"{record.place}: {config.split_column} of {record.name!r} is {record.part!r}, expected one of "
            f"{', '.join(map(repr, PARTS))}"
        )
    return record.part
