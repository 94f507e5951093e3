"""Reviews are dealt by seed, cut, and told apart by their words."""

import csv
import json
from pathlib import Path

import pytest

from experiments.benchmark.labels.reviews import reviews, write_table

WORDS = {"pos": "a wonderful film, wonderful to see", "neg": "a dull film, and far too long"}


def write_reviews(file: Path, count: int) -> Path:
    rows = [f"{label}\t{i}\t5\t{WORDS[label]} {i}\x85" for i in range(count) for label in WORDS]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def test_a_table_holds_each_review_once_and_cut(tmp_path: Path) -> None:
    files = {"train": write_reviews(tmp_path / "a.tsv", 20), "test": write_reviews(tmp_path / "b.tsv", 5)}
    tables = [write_table(files, tmp_path / f"{seed}.csv", seed, 12, 0).read_bytes() for seed in (0, 0, 1)]
    assert tables[0] == tables[1] != tables[2]
    rows = list(csv.DictReader(tables[0].decode().splitlines()))
    parts = [row["split"] for row in rows]
    assert {part: parts.count(part) for part in set(parts)} == {"train": 36, "validation": 4, "test": 10}
    assert all(len(row["sequence"].encode()) <= 12 for row in rows)


def test_words_tell_reviews_apart(tmp_path: Path) -> None:
    train, test = (write_reviews(tmp_path / f"{name}.tsv", 12) for name in ("train", "test"))
    options = {"out": str(tmp_path / "f.json"), "work": str(tmp_path / "w"), "seeds": 1, "longest": 63}
    found = reviews(str(train), str(test), **options)
    assert [(run["model"], run["accuracy"]) for run in found["runs"]] == [("start", 1.0)]
    assert json.loads((tmp_path / "f.json").read_text())["runs"][0]["k"] == 3
    with pytest.raises(FileNotFoundError, match=r"nowhere\.tsv"):
        reviews("nowhere.tsv", str(test), **options | {"work": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()
