"""Several columns of labels: the same from every kind of file, with empty cells; and records by difficulty."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from jaxblt.data import LabelledDataConfig, LabelTask, make_dataset, with_classes
from jaxblt.data.label_tasks import UNLABELLED
from jaxblt.data.labelled import label_lines, number_statistics

TASKS = (LabelTask("kind"), LabelTask("size", "number"))
ROWS = {
    f"r{i}": (
        "ACGT"[i % 4] * (3 + i % 5) + f"{i:02d}",
        ("", "b", "a")[i % 3],
        "" if i % 4 == 1 else f"{i}.5",
        90 - i,
    )
    for i in range(30)
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, text):
    opened = gzip.open if name.endswith(".gz") else open
    with opened(name, "wt") as file:
        file.write(text)


def write_table(name="r.csv"):
    rows = [f"{key},{kind},{size},{hard},{s}" for key, (s, kind, size, hard) in ROWS.items()]
    write(name, "\n".join(["id,kind,size,hard,sequence", *rows]) + "\n")


def write_jsonl():
    """An empty cell is a field that is missing, null or empty text."""
    lines = []
    for key, (s, kind, size, hard) in ROWS.items():
        row = {"id": key, "sequence": s, "kind": kind, "size": float(size) if size else None, "hard": hard}
        lines.append(json.dumps(row if size or key == "r1" else {k: row[k] for k in row if k != "size"}))
    write("r.jsonl", "\n".join(lines) + "\n")


def write_fasta():
    write("r.fa.gz", "".join(f">{key}\n{s}\n" for key, (s, *_) in ROWS.items()))
    rows = [f"{size}\t{kind}\t{key}\t{hard}" for key, (_, kind, size, hard) in ROWS.items()]
    write("labels.tsv", "\n".join(["size\tkind\tid\thard", *rows]) + "\n")


KINDS = {
    "r.csv": (write_table, {}),
    "r.jsonl": (write_jsonl, {}),
    "r.fa.gz": (write_fasta, {"labels": "labels.tsv"}),
}


def config_of(*paths, **fields):
    options = {"tasks": TASKS, "seq_len": 16, "batch_size": 4}
    if fields.get("split", "hash") == "hash":
        options["fractions"] = (0.6, 0.2, 0.2)
    return LabelledDataConfig(paths=paths, **options | fields)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_holds_the_same_labels(here, name):
    make, fields = KINDS[name]
    make()
    config = with_classes(config_of(name, **fields))
    assert [task.classes for task in config.tasks] == [("a", "b"), ()]
    assert with_classes(config) == config
    data, found = make_dataset(config, split="all", mode="eval"), {}
    for step in range(data.num_batches):
        labels = data.batch(step).labels
        assert {name: values.dtype for name, values in labels.items()} == {
            "kind": np.int32,
            "size": np.float32,
        }
        for row, number in enumerate(data.record_numbers(step)):
            kind, size = labels["kind"][row], labels["size"][row]
            if number < 0:
                assert kind == UNLABELLED
                assert np.isnan(size)
                continue
            found[data.records[number].name] = (
                "" if kind == UNLABELLED else config.tasks[0].classes[kind],
                "" if np.isnan(size) else str(size),
            )
    assert found == {key: (kind, size) for key, (_, kind, size, _) in ROWS.items()}


def test_labels_are_counted_and_statistics_skip_empty_cells(here):
    for name in ("r.csv", "v.csv", "t.csv"):
        write_table(name)
    config = with_classes(
        config_of("r.csv", split="files", validation_paths=("v.csv",), test_paths=("t.csv",))
    )
    assert label_lines(config) == [
        "task kind: 2 classes; labels of 20 of 30 train, 20 of 30 validation, 20 of 30 test records, empty cells do "
        "not count",
        "task size: number; labels of 22 of 30 train, 22 of 30 validation, 22 of 30 test records, empty cells do not "
        "count",
    ]
    numbers = [float(size) for _, _, size, _ in ROWS.values() if size]
    found = number_statistics(config, config.tasks[1])
    assert found == pytest.approx((np.mean(numbers), np.std(numbers)))


def test_easy_records_come_first(here):
    """By the column where one is named, of which smaller numbers are easier: here the last records of the file."""
    write_table()
    one = LabelledDataConfig(paths=("r.csv",), target="number", label="hard", seq_len=16, batch_size=4)
    for config in (config_of("r.csv"), one):
        config = with_classes(replace(config, easy_first=40, difficulty="hard", fractions=(1.0, 0.0, 0.0)))
        made = make_dataset(config, mode="train")
        names = [made.records[i].name for i in made.schedule.order]
        assert names == sorted(ROWS, key=lambda key: ROWS[key][3])
        for step in range(40):
            most = int(np.ceil(30 * np.sqrt(0.01 + 0.99 * step / 40)))
            assert {made.records[i].name for i in made.record_numbers(step)} <= set(names[:most])
    by_length = make_dataset(replace(config, difficulty=None), mode="train").schedule.order
    assert by_length == tuple(np.argsort([len(s) for s, *_ in ROWS.values()], kind="stable"))
