"""Texts with labels, and books: the layouts in which they were released."""

import gzip
import lzma
from dataclasses import replace

import numpy as np
import pytest

from jaxblt.data import EOS, TaskDataConfig, decode, make_dataset
from jaxblt.data.tasks import TextLabels, TextPairs, pg19
from jaxblt.training.stored.serialize import from_json, to_json

TEXTS = [("neg" if i % 2 else "pos", f"review {i} é") for i in range(40)]


@pytest.fixture(params=["table", "folders"])
def reviews(request, tmp_path):
    for part, texts in (("train", TEXTS), ("test", TEXTS[:6])):
        if request.param == "table":
            lines = [f"{label}\t{i}\t7\t{text}" for i, (label, text) in enumerate(texts)]
            (tmp_path / f"{part}_all.tsv.xz").write_bytes(lzma.compress("\n".join(lines).encode() + b"\n"))
            continue
        for i, (label, text) in enumerate(texts):
            (tmp_path / part / label).mkdir(parents=True, exist_ok=True)
            (tmp_path / part / label / f"{i:02}_7.txt").write_text(text, encoding="utf-8")
    return str(tmp_path)


def read(examples):
    found = [examples.example(i) for i in range(examples.count)]
    for inputs, _, scored in found:
        assert inputs[-1] == EOS
        assert scored.tolist() == [False] * (len(inputs) - 1) + [True]
    return {decode(e.inputs).decode(): decode(e.targets[e.scored]).decode() for e in found}


def test_texts_and_labels_of_every_split(reviews):
    task = TextLabels(path=reviews, max_bytes=20)
    train, validation, test = (read(task.open(split)) for split in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (36, 4, 6)
    expected = {text: str(int(label == "pos")) for label, text in TEXTS}
    assert train | validation == expected
    assert test.items() <= expected.items()


def test_long_texts_lose_their_end(reviews):
    inputs, targets, _ = TextLabels(path=reviews, max_bytes=3).open("test").example(0)
    assert decode(inputs) == b"rev"
    assert decode(targets[-1:]) in (b"0", b"1")


def test_too_few_texts_for_validation_are_refused(tmp_path):
    """A split without rows would be looked through without end."""
    (tmp_path / "train.tsv").write_text("pos\tfine\n" * 9)
    with pytest.raises(ValueError, match="no example for split 'validation': a tenth of 9 training texts"):
        TextLabels(path=str(tmp_path)).open("validation")
    assert TextLabels(path=str(tmp_path)).open("train").count == 9


def test_rows_of_texts(reviews):
    config = TaskDataConfig(task=TextLabels(path=reviews, max_bytes=20), seq_len=22, batch_size=4)
    batch = make_dataset(config).batch(0)
    assert np.asarray(batch.loss_mask).sum(1).tolist() == [1, 1, 1, 1]
    segments = np.asarray(batch.segment_ids)
    assert np.array_equal(segments, np.arange(22) < segments.sum(1)[:, None])
    assert set(make_dataset(replace(config, labels="digit")).batch(0).labels) <= {0, 1}
    with pytest.raises(
        ValueError, match=r"labels = 'symbol' of 2 classes, and a row answers with id 5[23]: set"
    ):
        make_dataset(replace(config, labels="symbol")).batch(0)


def test_an_unknown_label_is_named(tmp_path):
    (tmp_path / "test.tsv").write_text("pos\tfine\ngood\tfine\n")
    with pytest.raises(ValueError, match=r"line 2 begins with b'good', expected one of \('neg', 'pos'\)"):
        TextLabels(path=str(tmp_path)).open("test")
    (tmp_path / "test.tsv").write_text("pos\n")
    with pytest.raises(ValueError, match=r"line 1 begins with b'pos', expected one of .* and a tab"):
        TextLabels(path=str(tmp_path)).open("test")
    with pytest.raises(FileNotFoundError, match="train"):
        TextLabels(path=str(tmp_path)).open("train")


@pytest.mark.parametrize(
    ("name", "said"),
    [("test.tsv.gz", r"test\.tsv' and .*test\.tsv\.gz' are one file"), ("test.tsv~", "none of")],
)
def test_a_table_and_its_copy_do_not_count_twice(tmp_path, name, said):
    for file in ("test.tsv", name):
        data = b"pos\tfine\n"
        (tmp_path / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    with pytest.raises(ValueError, match=said):
        TextLabels(path=str(tmp_path)).open("test")


PAIRS = [("1.0", "first", "second"), ("0.0", "fi", "se é"), ("1", "", "alone")]


def test_pairs_of_texts_stand_in_one_row(tmp_path):
    for part, pairs in (("train", PAIRS), ("eval", PAIRS[:1]), ("test", PAIRS[1:])):
        lines = ["\t".join((label, "N01", "N02", *texts)) for label, *texts in pairs]
        (tmp_path / f"new_aan_pairs.{part}.tsv.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    task = TextPairs(path=str(tmp_path), max_bytes=5)
    expected = [(b"first", b"secon", b"1"), (b"fi", "se é".encode(), b"0"), (b"", b"alone", b"1")]
    for split, wanted in (("train", expected), ("validation", expected[:1]), ("test", expected[1:])):
        examples = task.open(split)
        assert examples.count == len(wanted)
        for number, (first, second, label) in enumerate(wanted):
            inputs, targets, scored = examples.example(number)
            ends = np.flatnonzero(inputs == EOS)
            assert ends.tolist() == [1 + len(first), len(inputs) - 1]
            assert (decode(inputs[: ends[0]]), decode(inputs[ends[0] :])) == (first, second)
            assert (decode(targets[scored]), np.flatnonzero(scored).tolist()) == (label, [len(inputs) - 1])
    data = TaskDataConfig(task=task, seq_len=task.length, batch_size=3, labels="digit")
    batch = make_dataset(data, split="train", mode="eval").batch(0)
    np.testing.assert_array_equal(batch.labels, [1, 0, 1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "1\tN1\tN2\ta\tb\n2\tN1\tN2\ta\tb\n",
            "line 2 has 5 columns and begins with b'2', expected 0 or 1 and 5",
        ),
        ("1\tN1\tN2\ta\n", "line 1 has 4 columns and begins with b'1', expected 0 or 1 and 5 columns"),
        ("", "is empty"),
    ],
)
def test_a_bad_line_of_pairs_is_named(tmp_path, text, said):
    (tmp_path / "a.test.tsv").write_text(text)
    with pytest.raises(ValueError, match=said):
        TextPairs(path=str(tmp_path)).open("test")


def test_pairs_are_stored_under_a_short_name():
    task = TextPairs(path="data/aan", max_bytes=7)
    assert '"class": "text_pairs"' in to_json(task)
    assert from_json(to_json(task)) == task


def test_several_tables_of_pairs_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"\*\.eval\.tsv"):
        TextPairs(path=str(tmp_path)).open("validation")
    for name in ("a.eval.tsv", "b.eval.tsv"):
        (tmp_path / name).write_text("1\tN1\tN2\ta\tb\n")
    with pytest.raises(
        ValueError, match=r"must hold one table \*\.eval\.tsv, .*, got a\.eval\.tsv, b\.eval\.tsv"
    ):
        TextPairs(path=str(tmp_path)).open("validation")


def test_books_are_split_by_folder(tmp_path):
    for i, part in enumerate(("train", "validation", "test")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "book.txt").write_bytes(bytes([97 + i]) * 50)
    config = pg19(str(tmp_path), seq_len=16, batch_size=2)
    for i, part in enumerate(("train", "validation", "test")):
        batch = make_dataset(config, split=part, mode="eval").batch(0)
        assert set(decode(batch.targets)) == {97 + i}
