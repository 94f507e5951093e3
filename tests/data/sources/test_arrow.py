"""Columns of Parquet and Arrow: the same bytes of every type and container, folders of saved datasets, labels."""

import builtins
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblt.answers.records import open_records
from jaxblt.data import ArrowSource, DataConfig, LabelledDataConfig, make_dataset, read_document
from jaxblt.data.labelled import read_parts
from jaxblt.data.sources import opening

TEXTS = ["plain", "", "café — \U0001f9ec", "x" * 1000, "a\r\nb"]
BYTES = [text.encode() for text in TEXTS]


def write_stream(path, table, rows=2):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_file(path, table):
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS = {
    "a.parquet": lambda path, table: pa.parquet.write_table(table, path, row_group_size=2),
    "a.arrow": write_file,
    "b.arrow": write_stream,
    "a.feather": lambda path, table: pa.feather.write_feather(table, str(path)),
}
LISTS = [list(data) for data in BYTES]
COLUMNS = {
    "string": pa.array(TEXTS),
    "large string": pa.array(TEXTS, pa.large_string()),
    "string view": pa.array(TEXTS, pa.string_view()),
    "binary": pa.array(BYTES),
    "large binary": pa.array(BYTES, pa.large_binary()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "list": pa.array(LISTS, pa.list_(pa.uint8())),
    "large list": pa.array(LISTS, pa.large_list(pa.uint8())),
    "a slice of lists": pa.array([[1], *LISTS, [2]], pa.list_(pa.uint8()))[1:-1],
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_type_in_every_container(tmp_path, kind):
    for name, write in WRITERS.items():
        if kind == "string view" and name == "a.feather":
            continue
        write(tmp_path / name, pa.table({"text": COLUMNS[kind], "other": range(len(TEXTS))}))
        source = ArrowSource(tmp_path / name)
        assert [read_document(source, i) for i in range(len(source))] == BYTES, name
        assert source.lengths.tolist() == [len(data) for data in BYTES]
        assert [label.rsplit(":")[-1] for label in source.names] == ["1", "2", "3", "4", "5"]
        assert source.read(2, 3, 9) == BYTES[2][3:9]
        assert pickle.loads(pickle.dumps(source)).read(3, 7, 999) == BYTES[3][7:999]
    with pytest.raises(IndexError, match=r"leave document .*, which has \[0, 5\)"):
        source.read(0, 0, 6)


def save_to_disk(folder, table, **state):
    """As `datasets` does: two files of a stream, and what lies in them."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-00002.arrow" for i in (1, 0)]
    for part, name in zip((table[:2], table[2:]), names, strict=True):
        write_stream(folder / name, part)
    told = {"_data_files": [{"filename": name} for name in names], "_split": "train", **state}
    (folder / "state.json").write_text(json.dumps(told))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def test_a_saved_dataset_is_trained_on_and_scored(tmp_path):
    folder = save_to_disk(tmp_path / "d", pa.table({"text": ["a" * 40, "b" * 40, "c" * 40, "d" * 40]}))
    config = DataConfig(paths=(str(folder),), kind="arrow", seq_len=16, batch_size=2, split="documents")
    data = make_dataset(config, split="all", mode="eval")
    text = b"".join(
        bytes(np.asarray(row[row > 3] - 4, np.uint8))
        for i in range(data.num_batches)
        for row in data.batch(i).inputs
    )
    assert text == b"".join(bytes([c]) * 40 for c in b"abcd")
    assert [name.split("/")[-1] for name in data.source.names][1:3] == [
        "data-00001-of-00002.arrow:2",
        "data-00000-of-00002.arrow:1",
    ]
    records = open_records(str(folder), config)
    assert [read_document(records, i)[:1] for i in range(4)] == [b"a", b"b", b"c", b"d"]


def test_folders_that_are_no_saved_dataset_are_named(tmp_path):
    table = pa.table({"text": TEXTS})
    cases = {
        "rows apart": (
            {"_indices_data_files": [{"filename": "i.arrow"}]},
            "names rows apart from the data: save the dataset",
        ),
        "outside": (
            {"_data_files": [{"filename": "../a"}]},
            r"names '../a', which lies outside of its folder",
        ),
        "missing": ({"_data_files": [{"filename": "a"}]}, r"a' is missing, which .*state.json' lists"),
        "no list": ({"_data_files": None}, "lists no _data_files: save the dataset anew"),
    }
    for name, (state, said) in cases.items():
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            ArrowSource(save_to_disk(tmp_path / name, table, **state))
    for text, said in (("[]", "holds a list, expected an object"), ("{", "is not JSON")):
        (tmp_path / "missing" / "state.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            ArrowSource(tmp_path / "missing")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        IsADirectoryError, match=r"holds the splits \['train', 'test'\]: name one, such as '.*/train'"
    ):
        ArrowSource(tmp_path)


def config_of(*paths, **fields):
    return LabelledDataConfig(paths=tuple(map(str, paths)), seq_len=32, batch_size=2, **fields)


def test_labels_stand_in_columns_beside_the_sequence(tmp_path):
    table = pa.table(
        {
            "id": ["one", "two", "three"],
            "sequence": pa.array([b"ACGT", b"GG", b"\xff"]),
            "label": pa.array([0, 1, 0]),
            "score": pa.array([0.5, None, 2.0]),
            "split": ["train", "test", "train"],
            "notes": pa.array([[1], [2], []]),
        }
    )
    pa.parquet.write_table(table, tmp_path / "r.parquet")
    folder = save_to_disk(tmp_path / "d", table)
    for path in (tmp_path / "r.parquet", folder):
        parts = read_parts(config_of(path, split="column"))
        assert [(r.name, r.sequence, r.label) for r in parts["train"]] == [
            ("one", b"ACGT", "0"),
            ("three", b"\xff", "0"),
        ]
        assert [(r.name, r.label) for r in parts["test"]] == [("two", "1")]
    place = rf"{tmp_path / 'r.parquet'}:2: field 'score' holds None, expected text or a number"
    with pytest.raises(ValueError, match=place):
        read_parts(config_of(tmp_path / "r.parquet", label="score"))
    with pytest.raises(
        ValueError, match=r"r.parquet:1: field 'notes' holds \[1\], expected text or a number"
    ):
        read_parts(config_of(tmp_path / "r.parquet", label="notes"))
    with pytest.raises(ValueError, match=r"r.parquet' has 0 columns 'class', it has \['id', 'sequence'"):
        read_parts(config_of(tmp_path / "r.parquet", label="class"))


def test_a_column_that_holds_far_more_than_its_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "FREE", 1 << 16)
    pa.parquet.write_table(pa.table({"text": ["A" * 1000] * 20_000}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet' of .* bytes holds more than .* once decompressed"):
        ArrowSource(tmp_path / "a.parquet")


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    write_file(tmp_path / "a.arrow", pa.table({"text": TEXTS}))
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"read by pyarrow: pip install 'jaxblt\[arrow\]'"):
        ArrowSource(tmp_path / "a.arrow")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a file of each container."""
    folder, table = tmp_path_factory.mktemp("arrow"), pa.table({"text": TEXTS})
    for name, write in WRITERS.items():
        write(folder / name, table)
    return folder, {name: (folder / name).read_bytes() for name in WRITERS}


@settings(max_examples=60)
@given(st.data())
def test_damaged_files_are_read_or_named(whole, data):
    """Cut or with other bytes: no byte of another place in memory is read, and the error is one line."""
    folder, held = whole
    name = data.draw(st.sampled_from(sorted(held)))
    damaged = bytearray(held[name])
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(8, len(damaged) - 1), st.integers(0, 255)), max_size=3)
    ):
        damaged[place] = byte
    del damaged[data.draw(st.integers(len(damaged) // 2, len(damaged))) :]
    path = folder / f"damaged-{name}"
    path.write_bytes(damaged)
    refusal = ""
    try:
        source = ArrowSource(path)
        found = [read_document(source, i) for i in range(len(source))]
        assert [len(text) for text in found] == source.lengths.tolist()
    except (ValueError, OSError) as error:
        refusal = str(error)
    if refusal:
        assert path.name in refusal
        assert "\n" not in refusal
