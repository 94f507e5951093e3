"""Configs: every kind of source, and each mistake met with its value and the fix."""

import dataclasses
import json
import lzma
import warnings
from typing import Any

import pyarrow.parquet
import pytest

from jaxblt.data import (
    BytesSource,
    DataConfig,
    KindWarning,
    SourceConfig,
    make_dataset,
    open_source,
    read_document,
)


def build(**options: Any) -> DataConfig:
    return DataConfig(**options)


def test_each_kind_opens(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "a.jsonl").write_text('{"body": "json"}')
    (tmp_path / "a.fa.xz").write_bytes(lzma.compress(b">c\nacgtACGT\n"))
    (tmp_path / "a.bed").write_text("c\t2\t10\tx\n")

    def first(name, **options):
        return read_document(open_source(build(paths=(str(tmp_path / name),), **options)), 0)

    assert first("a.txt") == b"text"
    assert first("a.jsonl", kind="jsonl", field="body") == b"json"
    assert first("a.fa.xz", kind="fasta") == b"acgtACGT"
    assert first("a.fa.xz", kind="fasta", soft_mask="upper") == b"ACGTACGT"
    assert first("a.fa.xz", kind="fasta", bed=str(tmp_path / "a.bed")) == b"gtACGTNN"
    assert first("a.fa.xz", kind="bytes") == lzma.compress(b">c\nacgtACGT\n")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["column"]}), tmp_path / "a.parquet")
    assert first("a.parquet", kind="arrow", field="body") == b"column"
    assert first("a.parquet", kind="bytes").startswith(b"PAR1")
    assert len(open_source(build(sample="udhr"))) == 18


def test_a_config_is_plain_data():
    made = build(paths=("a", "b"), buckets=(1, 2), packing="buckets")
    data = json.loads(json.dumps(dataclasses.asdict(made)))
    restored = build(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
    assert restored == made
    assert hash(restored) == hash(made)


def test_eos_follows_text_but_not_genomes():
    assert build(sample="book").ends_with_eos
    assert build(paths=("x",), kind="jsonl").ends_with_eos
    assert not build(sample="lambda").ends_with_eos
    assert not build(paths=("x",), kind="fasta").ends_with_eos
    assert not build(sample="book", eos=False).ends_with_eos


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"give either paths or sample, got paths=\(\) and sample=None"),
        ({"paths": ("x",), "sample": "book"}, "give either paths or sample"),
        ({"sample": "boook"}, "unknown sample 'boook': choose one of 'book', 'udhr', 'lambda'"),
        (
            {"paths": ("x",), "kind": "csv"},
            "kind must be one of 'text', 'jsonl', 'fasta', 'arrow', 'bytes', got",
        ),
        (
            {"sample": "book", "split": "position", "seq_len": 200_000},
            r"seq_len = 200000 is longer than every doc",
        ),
        ({"sample": "book", "packing": "best"}, "packing must be one of 'windows', .*, got 'best'"),
        ({"sample": "book", "split": "random"}, "split must be one of 'documents', .*, got 'random'"),
        ({"sample": "book", "split": "documents", "fractions": (0.0, 0.0, 1.0)}, "gets none of 1 documents"),
        (
            {"sample": "book", "scored": "aé"},
            "data.scored = 'aé' must be characters of one byte, such as 'ACGT'",
        ),
        (
            {"sample": "book", "split_seed": 1},
            "data.split_seed = 1 is read with split='documents' only, and no",
        ),
        (
            {"sample": "book", "long_documents": "error"},
            "data.long_documents = 'error' is read with packing='fi",
        ),
        (
            {"sample": "book", "packing": "first_fit", "partial": "drop"},
            "data.partial = 'drop' is read with packing='windows' only",
        ),
        (
            {"sample": "book", "split": "names", "test_names": ("b*",), "fractions": (0.5, 0.5, 0.0)},
            r"data.fractions = \(0.5, 0.5, 0.0\) is read with split='documents' or 'position' only",
        ),
        ({"sample": "book", "soft_mask": "upper"}, "data.soft_mask = 'upper' is read with kind='fasta' only"),
        (
            {"paths": ("x.jsonl",), "field": "body"},
            "data.field = 'body' is read with kind='jsonl' or kind='arrow' only, and no",
        ),
        (
            {"sources": (SourceConfig(name="a", sample="book"),), "field": "body"},
            "data.field = 'body' is read with kind='jsonl' or kind='arrow' of a source only",
        ),
    ],
)
def test_mistakes_that_show_when_data_is_opened(options, message):
    with pytest.raises(ValueError, match=message):
        make_dataset(build(**options))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a.jsonl", "set data.kind='jsonl' to"),
        ("a.fa", "set data.kind='fasta' to"),
        ("a.FASTA", "set data.kind='fasta' to"),
        ("a.fastq", "write its sequences as FASTA"),
        ("a.gbk", "write its sequences as FASTA"),
        ("a.txt", None),
    ],
)
def test_a_file_of_another_kind_that_is_read_as_text_is_told(tmp_path, name, fix):
    (tmp_path / name).write_bytes(b">a\nACGT\n")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        open_source(build(paths=(str(tmp_path / name),)))
    said = f"{str(tmp_path / name)!r} is read as text, its markup included: {fix}"
    assert [str(warning.message).startswith(said) for warning in told] == ([True] if fix else [])


def test_mistakes_of_the_call():
    wrong: Any = "dev"
    with pytest.raises(ValueError, match="unknown mode 'dev': choose 'train' or 'eval'"):
        make_dataset(build(sample="book"), mode=wrong)
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        make_dataset(build(sample="book"), split=wrong)
    for index, count in ((0, 3), (2, 2)):
        with pytest.raises(ValueError, match=f"batch_size = 8 must be a multiple of process_count = {count}"):
            make_dataset(build(sample="book"), process_index=index, process_count=count)
    with pytest.raises(FileNotFoundError, match=r"does not exist: '/no/such.txt'"):
        make_dataset(build(paths=("/no/such.txt",)))
    with pytest.raises(ValueError, match="split 'all' holds no byte"):
        make_dataset(build(packing="first_fit", eos=False), split="all", source=BytesSource([b"", b""]))


def test_a_short_split_can_be_evaluated_in_longer_windows():
    dataset = make_dataset(build(sample="lambda", seq_len=16_384), split="test", mode="eval")
    assert dataset.batch(0).loss_mask.sum() == dataset.num_bytes == 4850


def test_markup_is_warned_of_once_whichever_split_is_opened(tmp_path):
    """Python forgets what it has said whenever some library changes a filter."""
    (tmp_path / "once.fa").write_text(">a\n" + "ACGT" * 99)
    config = DataConfig(paths=(str(tmp_path / "once.fa"),), kind="text", split="position", seq_len=32)
    with warnings.catch_warnings(record=True) as caught:
        for split in ("train", "validation"):
            warnings.simplefilter("always")
            make_dataset(config, split=split, mode="eval")
    assert [str(one.message) for one in caught if one.category is KindWarning] == [
        f"'{tmp_path}/once.fa' is read as text, its markup included: set data.kind='fasta' to read its records"
    ]
