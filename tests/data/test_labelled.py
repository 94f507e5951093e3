"""Labelled records: read from every kind of file, dealt to splits, made into rows; what is wrong is named."""

import csv
import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from jaxblt.data import BOS, OFFSET, LabelledDataConfig, LabelTask, make_dataset, with_classes
from jaxblt.data.labelled import UNLABELLED, fitting_length, label_lines, number_statistics, read_parts
from jaxblt.data.sources.tables import TABLES, read_table

SEQUENCES = {f"r{i}": "ACGT"[i % 4] * (3 + i % 5) + "ACGTTGCA"[: i % 7] + f"{i:02d}" for i in range(40)}
LABELS = {name: "yes" if "A" in sequence[:1] else "no" for name, sequence in SEQUENCES.items()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, text):
    with open(name, "w") as file:
        file.write(text)


def write_fasta(name="r.fa.gz"):
    with gzip.open(name, "wt") as file:
        file.write("".join(f">{key} made up\n{sequence}\n" for key, sequence in SEQUENCES.items()))
    write("labels.tsv", "".join(f"{key}\t{label}\n" for key, label in LABELS.items()))


def write_table(name="r.csv", comma=","):
    lines = [comma.join(("id", "label", "sequence"))]
    write(
        name, "\n".join([*lines, *(comma.join((key, LABELS[key], s)) for key, s in SEQUENCES.items())]) + "\n"
    )


def write_jsonl(name="r.jsonl"):
    rows = [{"sequence": s, "label": LABELS[key], "id": key} for key, s in SEQUENCES.items()]
    write(name, "".join(json.dumps(row) + "\n" for row in rows))


def write_bed(name="r.bed"):
    with gzip.open("genome.fa.gz", "wt") as file:
        file.write(">chr\n" + "".join(SEQUENCES.values()) + "\n")
    ends = np.cumsum([len(s) for s in SEQUENCES.values()])
    spans = zip(np.roll(ends, 1) * (np.arange(len(ends)) > 0), ends, LABELS.values(), strict=True)
    write(name, "".join(f"chr\t{start}\t{stop}\t{label}\n" for start, stop, label in spans))


KINDS = {
    "r.fa.gz": (write_fasta, {"labels": "labels.tsv"}),
    "r.csv": (write_table, {}),
    "r.tsv": (lambda: write_table("r.tsv", "\t"), {}),
    "r.jsonl": (write_jsonl, {}),
    "r.bed": (write_bed, {"genome": "genome.fa.gz"}),
}


def config_of(*paths, **fields):
    dealt = {"fractions": (0.6, 0.2, 0.2)} if fields.get("split", "hash") in ("hash", "groups") else {}
    return LabelledDataConfig(paths=paths, **{"seq_len": 32, "batch_size": 4, **dealt, **fields})


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_holds_the_same_records(here, name):
    make, fields = KINDS[name]
    make()
    config = with_classes(config_of(name, **fields))
    assert config.classes == ("no", "yes")
    found = {}
    for split in ("train", "validation", "test"):
        data = make_dataset(config, split=split, mode="eval")
        for step in range(data.num_batches):
            batch, numbers = data.batch(step), data.record_numbers(step)
            for row, number in enumerate(numbers):
                held = np.asarray(batch.segment_ids[row]) == 1
                ids = batch.inputs[row][held]
                assert ids[0] == BOS if number >= 0 else not len(ids)
                if number >= 0:
                    text = bytes((ids[1:] - OFFSET).astype(np.uint8)).decode()
                    assert text not in found, "a record stands in two splits, or twice in one"
                    found[text] = config.classes[batch.labels[row]]
    assert found == {sequence: LABELS[key] for key, sequence in SEQUENCES.items()}
    assert fitting_length(config, 8) == -(-(max(map(len, SEQUENCES.values())) + 1) // 8) * 8
    sizes = {split: len(records) for split, records in read_parts(config).items()}
    assert sizes["train"] > sizes["validation"] > 0
    assert sizes["test"] > 0


def test_equal_sequences_lie_in_one_part(here):
    write_jsonl()
    before = {r.sequence: part for part, records in read_parts(config_of("r.jsonl")).items() for r in records}
    with open("r.jsonl", "a") as file:
        file.writelines(json.dumps({"sequence": s, "label": "no"}) + "\n" for s in SEQUENCES.values())
    after = [(part, r) for part, records in read_parts(config_of("r.jsonl")).items() for r in records]
    assert len(after) == 2 * len(SEQUENCES)
    assert all(before[record.sequence] == part for part, record in after)
    assert after[-1][1].name == after[-1][1].place


def test_near_copies_lie_in_one_part(here):
    """By a hash they do not, and equal sequences do."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(60):
        stretch = "".join("ACGT"[i] for i in rng.integers(0, 4, 90))
        rows += [
            (group, stretch[i : i + 80], ("yes", "no")[group % 2], f"{i}.5") for i in range(1 + group % 4)
        ]
    lines = [f"g{group},{stretch},{label},{number}\n" for group, stretch, label, number in rows]
    write("g.csv", "id,sequence,label,number\n" + "".join(lines))
    config = config_of("g.csv", seq_len=96, split="groups")
    for more in ({}, {"split_seed": 3}, {"tasks": (LabelTask("number", "number"), LabelTask("label"))}):
        parts = read_parts(replace(config, **more))
        names = {part: {record.name for record in records} for part, records in parts.items()}
        assert sum(map(len, names.values())) == 60
        assert [len(records) for records in parts.values()] == [90, 30, 30]
        place = 1 if "tasks" in more else 0
        yes = [sum(record.labels[place] == "yes" for record in records) for records in parts.values()]
        assert yes == [36, 12, 12]
    strict, loose = (read_parts(replace(config, **more)) for more in ({"group_share": 1.0}, {"group_k": 79}))
    assert all(len({r.name for records in p.values() for r in records}) == 60 for p in (strict, loose))
    assert len(strict["test"]) == 30
    (line,) = label_lines(with_classes(config))
    assert (
        line
        == "data.split = 'groups' deals whole groups of near-copies: 90 train, 30 validation, 30 test records"
    )
    hashed = {part: {r.name for r in records} for part, records in read_parts(config_of("g.csv")).items()}
    assert hashed["train"] & hashed["test"]
    write("one.csv", "sequence,label\n" + "".join(f"{'ACGTTGCATA' * 5}{'ACGT'[i]},x\n" for i in range(4)))
    with pytest.raises(ValueError, match="4 records are 1 group of near-copies"):
        read_parts(config_of("one.csv", split="groups"))


def test_splits_by_column_and_by_file(here):
    write("a.csv", "sequence,label,split\nAC,x,train\nAG,y,validation\nAT,x,test\nTT,y,train\n")
    parts = read_parts(config_of("a.csv", split="column"))
    assert {name: [r.sequence for r in records] for name, records in parts.items()} == {
        "train": [b"AC", b"TT"],
        "validation": [b"AG"],
        "test": [b"AT"],
    }
    assert label_lines(with_classes(config_of("a.csv", split="column"))) == []
    write("a2.csv", "sequence,label,split\nAC,x,train\nAG,y,validation\nAT,x,test\nTT,z,train\n")
    (line,) = label_lines(with_classes(config_of("a2.csv", split="column")))
    assert line == "classes that no training record has, so that none is learned: y"
    held = {"validation_paths": ("held/b.csv",), "test_paths": ("held/c.csv",)}
    (here / "held").mkdir()
    for (name,) in held.values():
        write(name, "sequence,label\nAC,x\nAG,y\n")
    files = config_of("a.csv", split="files", **held)
    assert [len(records) for records in read_parts(files).values()] == [4, 2, 2]
    with pytest.raises(
        ValueError, match=r"c.csv' is named by paths and by test_paths, whose records no other part may hold"
    ):
        read_parts(config_of("held/[a-c].csv", split="files", test_paths=("held/../held/c.csv",)))
    write("b.fa.gz", "")
    with gzip.open("b.fa.gz", "wt") as file:
        file.write(">one\nAC\n>two\nGT\n")
    write("b.tsv", "label\tsplit\tid\nx\ttest\tone\ny\ttrain\ttwo\n")
    parts = read_parts(config_of("b.fa.gz", labels="b.tsv", split="column"))
    assert [(r.name, r.label) for r in parts["test"]] == [("one", "x")]


def test_numbers_and_positions(here):
    write("n.csv", "sequence,label\nACGT,1.5\nAC,-2\nACG,3\n")
    config = config_of("n.csv", target="number", split="files")
    assert with_classes(config) is config
    assert make_dataset(config, mode="eval").batch(0).labels.tolist() == [1.5, -2.0, 3.0, 0.0]
    assert number_statistics(config) == pytest.approx((np.mean([1.5, -2, 3]), np.std([1.5, -2, 3])))
    write("p.csv", "sequence,label\nACGT,HHEE\nAC,-H\n")
    config = with_classes(config_of("p.csv", target="positions", split="files", seq_len=6))
    assert config.classes == ("-", "E", "H")
    labels = make_dataset(config, mode="eval").batch(0).labels
    empty = [UNLABELLED] * 6
    assert labels.tolist() == [
        [UNLABELLED, 2, 2, 1, 1, UNLABELLED],
        [UNLABELLED, 0, 2, *empty[3:]],
        empty,
        empty,
    ]


BAD_ROWS = {
    "a label of no record": (
        "r.fa.gz",
        lambda: write_label("r40\tyes"),
        r"labels.tsv:41: id 'r40' is no record of",
    ),
    "a record without a label": (
        "r.fa.gz",
        lambda: write_label(drop=3),
        r"r.fa.gz:7: record 'r3' has no label in",
    ),
    "an id twice": (
        "r.fa.gz",
        lambda: write_label("r3\tno"),
        r"labels.tsv:41: id 'r3' has a label already, in labels.tsv:4: keep one of the two rows, or rename one id",
    ),
    "an empty label": ("r.csv", lambda: append("r.csv", "x,,ACGT"), r"r.csv:42: record 'x' has no label"),
    "an empty sequence": (
        "r.csv",
        lambda: append("r.csv", "x,yes,"),
        r"r.csv:42: record 'x' has an empty sequence",
    ),
    "too few cells": (
        "r.csv",
        lambda: append("r.csv", "x,yes"),
        r"r.csv:42 has 2 cells, expected 3: id, label, seq",
    ),
    "no class": (
        "r.csv",
        lambda: append("r.csv", "x,maybe,ACGT"),
        r"r.csv:42: label 'maybe' of 'x' is none of the cl",
    ),
    "too long": (
        "r.csv",
        lambda: append("r.csv", f"x,no,{'A' * 32}"),
        r"r.csv:42: record 'x' has 32 bytes, which do n",
    ),
    "no field": (
        "r.jsonl",
        lambda: append("r.jsonl", '{"sequence": "A"}'),
        r"r.jsonl:41: field 'label' holds None, exp",
    ),
    "no such chromosome": (
        "r.bed",
        lambda: append("r.bed", "chrX\t1\t2\tno"),
        r"r.bed:41: the genome has no record 'ch",
    ),
    "an interval without a class": (
        "r.bed",
        lambda: append("r.bed", "chr\t1\t2"),
        r"r.bed:41: record 'chr:1-2' has no",
    ),
}


BAD_TABLES = {
    "blank lines alone": ("", r"t.csv' holds blank lines alone: expected rows of a table"),
    "a column twice": (
        "sequence,label,label\nA,1,0",
        r"t.csv:1 has 2 columns 'label': leave one, or rename it",
    ),
    "text behind a quote": (
        'sequence,label\nA,x\n"Foo" said,y',
        r"t.csv:3 is no row of a table: ',' expected after",
    ),
    "tabs and lines in quotes": (
        'sequence\tlabel\n"Foo\tx\nBar\ty\nend"\tx',
        r"t.tsv:2 is no row of a table: a cell that begins with a quote ends in line 4; write a quote that",
    ),
    "a quote that stays open": (
        'sequence\tlabel\nA\tx\n"Foo\ty',
        r"t.tsv:3 is no row of a table: unexpected end",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables_are_no_other_records(here, case):
    text, said = BAD_TABLES[case]
    name = "t.tsv" if "\t" in text else "t.csv"
    write(name, f"{text}\n")
    with pytest.raises(ValueError, match=said) as caught:
        read_parts(config_of(name))
    assert "\n" not in str(caught.value)


def test_tables_of_labels_are_held_to_the_same(here):
    write_fasta()
    for text, said in (
        ("\n\n", "holds blank lines alone"),
        ("id\tlabel\tlabel\nr0\ta\tb\n", "2 columns 'label'"),
    ):
        write("labels.tsv", text)
        with pytest.raises(ValueError, match=rf"labels.tsv'.*{said}"):
            read_parts(config_of("r.fa.gz", labels="labels.tsv"))


def test_cells_of_a_csv_may_hold_quotes_and_lines(here):
    write("t.csv", 'sequence,label\n"two\nlines, one cell",x\n"say ""hi""",y\n5" pipe,x\n')
    records = [record.sequence for part in read_parts(config_of("t.csv")).values() for record in part]
    assert set(records) == {b"two\nlines, one cell", b'say "hi"', b'5" pipe'}


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_a_cell_may_be_longer_than_pythons_limit(here, name):
    """The limit stays what it is for other readers, also while a table is being read."""
    before, long = csv.field_size_limit(), "ACGT" * 100_000
    write(name, f"sequence,label\n{long},x\nAC,y\n".replace(",", "," if name == "t.csv" else "\t"))
    rows = read_table(here / name, TABLES[name[1:]])
    assert next(rows)[1] == ["sequence", "label"]
    assert csv.field_size_limit() == before
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda seed: read_parts(config_of(name, split_seed=seed)), range(8)))
    for part in parts:
        assert max(len(r.sequence) for records in part.values() for r in records) == len(long)
    assert [len(cells[0]) for _, cells in rows] == [len(long), 2]
    assert csv.field_size_limit() == before


def test_one_column_is_not_the_sequence_and_its_label(here):
    write_table()
    write_jsonl()
    for name, fields, said in (
        ("r.csv", {"label": "sequence"}, "the sequences and a label"),
        ("r.jsonl", {"label": "sequence"}, "the sequences and a label"),
        ("r.csv", {"tasks": (LabelTask("label"), LabelTask("sequence"))}, "the sequences and a label"),
        ("r.csv", {"split": "column", "split_column": "sequence"}, "the sequences and the split"),
    ):
        with pytest.raises(
            ValueError, match=f"'{name}': column 'sequence' cannot be {said}: name another column"
        ):
            read_parts(config_of(name, **fields))
    with pytest.raises(ValueError, match="column 'label' cannot be a label and the split"):
        read_parts(config_of("r.csv", split="column", split_column="label"))


def append(name, line):
    with open(name, "a") as file:
        file.write(f"{line}\n")


def write_label(line=None, drop=None):
    rows = [f"{key}\t{label}" for i, (key, label) in enumerate(LABELS.items()) if i != drop]
    write("labels.tsv", "\n".join(rows + ([line] if line else [])) + "\n")


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named_by_file_and_line(here, case):
    name, spoil, said = BAD_ROWS[case]
    make, fields = KINDS[name]
    make()
    config = with_classes(config_of(name, **fields))
    spoil()
    with pytest.raises(ValueError, match=said) as caught:
        make_dataset(config, split="all", mode="eval")
    assert "\n" not in str(caught.value)


def test_the_other_strand_is_read_with_its_labels(here):
    """In training alone, half of the rows; the class of each letter below is told by its complement's."""
    write("p.csv", "sequence,label\n" + "".join(f"{'ACGT' * k}GA,{'acgt' * k}ga\n" for k in range(1, 7)))
    files = {"target": "positions", "split": "files", "seq_len": 32}
    config = with_classes(replace(config_of("p.csv", **files), reverse_complement=True))
    made = make_dataset(config, mode="train")
    complement, flipped = dict(zip("acgt", "TGCA", strict=True)), []
    for step in range(16):
        batch = made.batch(step)
        for ids, labels in zip(batch.inputs, batch.labels, strict=True):
            held = labels != UNLABELLED
            read = bytes((ids[held] - OFFSET).astype(np.uint8)).decode()
            said = [config.classes[i] for i in labels[held]]
            flipped.append(read.startswith("TC"))
            assert read == "".join(complement[c] if flipped[-1] else c.upper() for c in said)
        again = made.batch(step, slots=[1])
        assert np.array_equal(again.inputs[0], batch.inputs[1])
        assert np.array_equal(again.labels[0], batch.labels[1])
    assert 0.3 < np.mean(flipped) < 0.7
    plain = make_dataset(config, mode="eval").batch(0)
    assert all(ids[1] - OFFSET == ord("A") for ids in plain.inputs)


def test_short_records_come_first(here):
    write_table()
    made = make_dataset(replace(with_classes(config_of("r.csv")), easy_first=40), mode="train")
    short, seen = np.sort(made.source.lengths) + 1, []
    for step in range(40):
        held = (made.batch(step).segment_ids > 0).sum(1)
        most = int(np.ceil(len(short) * np.sqrt(0.01 + 0.99 * step / 40)))
        assert held.max() <= short[most - 1]
        seen += held.tolist()
    assert max(seen[:8]) < max(seen)
    with pytest.raises(ValueError, match=r"easy_first = 4 needs rows of one length, got buckets \(16,\)"):
        config_of("r.csv", easy_first=4, buckets=(16,))


def test_bad_configs_of_labelled_data(here):
    write_table()
    config = config_of("r.csv")
    for wrong, said in (
        ({}, "classes of the labelled data are open"),
        (
            {"classes": ("no", "yes"), "label": "class"},
            r"r.csv:1 has no column 'class', it has \['id', 'label', 'seq",
        ),
        (
            {"classes": ("no", "yes"), "labels": "r.csv"},
            r"labels='r.csv' are of FASTA files, got \('r.csv',\)",
        ),
        ({"classes": ("no", "yes"), "fractions": (1.0, 0.0, 0.0)}, "split 'test' gets none of 40 records"),
        ({"target": "number"}, "r.csv:2: label 'yes' of 'r0' is no finite number"),
        (
            {"target": "number", "split_column": "label"},
            "data.split_column = 'label' is read with split='column' only, and nothing",
        ),
        (
            {"target": "number", "split": "files", "split_seed": 1},
            "data.split_seed = 1 is read with split='hash' or 'groups' only",
        ),
        ({"target": "number", "group_k": 9}, "data.group_k = 9 is read with split='groups' only"),
        ({"target": "number", "group_share": 0.4}, "data.group_share = 0.4 is read with split='groups' only"),
        (
            {"target": "number", "split": "column"},
            r"data.fractions = \(0.6, 0.2, 0.2\) is read with split='hash' or 'groups' only",
        ),
        (
            {"target": "number", "genome": "r.csv"},
            "data.genome = 'r.csv' is read with a .bed file among the paths only",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            make_dataset(replace(config, **wrong), split="test", mode="eval")
    write("one.csv", "sequence,label\nAC,x\nCA,x\n")
    with pytest.raises(ValueError, match=r"name one class, \['x'\]"):
        with_classes(config_of("one.csv"))
    write("p.csv", "sequence,label\nACGT,HHE\nAC,EH\n")
    positions = with_classes(config_of("p.csv", target="positions", split="files"))
    with pytest.raises(ValueError, match=r"p.csv:2: the label of 'p.csv:2' has 3 characters for 4 bytes"):
        make_dataset(positions, mode="eval")
    write("r.txt", "x")
    with pytest.raises(ValueError, match=r"'r.txt' ends in none of \.csv"):
        with_classes(config_of("r.txt"))
