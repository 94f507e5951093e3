"""Texts with labels, and books: the layouts in which they were released."""

import gzip
import lzma

import numpy as np
import pytest

from jaxblt.data import EOS, TaskDataConfig, decode, make_dataset
from jaxblt.evaluation.tasks import TextLabels, pg19

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


def test_books_are_split_by_folder(tmp_path):
    for i, part in enumerate(("train", "validation", "test")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "book.txt").write_bytes(bytes([97 + i]) * 50)
    config = pg19(str(tmp_path), seq_len=16, batch_size=2)
    for i, part in enumerate(("train", "validation", "test")):
        batch = make_dataset(config, split=part, mode="eval").batch(0)
        assert set(decode(batch.targets)) == {97 + i}
