"""Files of any content: each is read, or refused by one line that names it."""

import gzip
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxblt.data import BytesSource, FastaSource, JsonlSource, open_bed, read_document

few = settings(max_examples=40)

FASTA_PARTS = [
    b">",
    b">a",
    b">b x",
    b"\n",
    b"\r\n",
    b"\r",
    b"ACGT",
    b"AC",
    b"N",
    b" ",
    b"\t",
    b";",
    b"\xff",
    b"\0",
]
fasta_bytes = st.lists(st.sampled_from(FASTA_PARTS), max_size=12).map(b"".join) | st.binary(max_size=30)
fai_columns = st.lists(st.sampled_from(["0", "1", "3", "4", "5", "-3", "99", "x"]), min_size=4, max_size=4)
fai_text = st.lists(fai_columns, max_size=2).map(
    lambda rows: "".join("\t".join(["a", *row]) + "\n" for row in rows)
)

LINE = json.dumps({"id": 1, "text": "caf\u00e9 \U0001f9ec", "other": [1, None, {"text": 2}]}).encode()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["text", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
).map(lambda value: json.dumps(value).encode())
cut_line = st.integers(0, len(LINE)).map(lambda end: LINE[:end])
json_line = st.just(LINE) | json_values | cut_line | st.binary(max_size=8)
jsonl_bytes = st.lists(json_line, max_size=4).map(b"\n".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read_or_refuse(path, read):
    """All documents of a source, or None if it was refused as it should be."""
    refusal = ""
    try:
        source = read(path)
        documents = [read_document(source, i) for i in range(len(source))]
    except (ValueError, OSError) as error:
        refusal = str(error)
    if refusal:
        assert path.name in refusal
        assert "\n" not in refusal
        return None
    assert [len(document) for document in documents] == source.lengths.tolist()
    return documents


def write(path, data):
    path.with_name(path.name + ".fai").unlink(missing_ok=True)
    path.write_bytes(data)
    return path


@few
@given(fasta_bytes)
@example(b"\r>a\n;C\n>b\nG\n")
def test_fasta(folder, data):
    plain = read_or_refuse(write(folder / "a.fa", data), FastaSource)
    held = read_or_refuse(write(folder / "b.fa.gz", gzip.compress(data, 0)), FastaSource)
    assert plain is None or plain == held


@few
@given(fai_text)
def test_fasta_index(folder, index):
    path = write(folder / "c.fa", b">a\nACGT\nAC\n>b\nA\n")
    path.with_name("c.fa.fai").write_text(index)
    documents = read_or_refuse(path, FastaSource)
    assert documents is None or index or documents == [b"ACGTAC", b"A"]


@few
@given(st.binary(max_size=30))
def test_damaged_gzip(folder, data):
    whole = gzip.compress(b">a\nACGT\n", mtime=0)
    for damaged in (data, whole[: len(data)], whole[: len(data)] + data, whole):
        documents = read_or_refuse(write(folder / "d.fa.gz", damaged), FastaSource)
        assert damaged != whole or documents == [b"ACGT"]


@pytest.mark.slow(days=28, group="costly", turn="data/sources/test_fuzz")
@few
@given(jsonl_bytes)
def test_jsonl(folder, data):
    plain = read_or_refuse(write(folder / "a.jsonl", data), JsonlSource)
    assert plain == read_or_refuse(write(folder / "b.jsonl.gz", gzip.compress(data, 0)), JsonlSource)


@few
@given(
    st.lists(
        st.sampled_from(["a", "b", "\t", " ", "\n", "0", "1", "4", "-3", "99", "+", "#", "track"]),
        max_size=16,
    )
)
def test_bed(folder, parts):
    genome = BytesSource([b"ACGTAC", b"A"], ["a", "b"])
    found = read_or_refuse(
        write(folder / "a.bed", "".join(parts).encode()), lambda path: open_bed(genome, path)
    )
    strands = b"ACGTAC A GTACGT T"
    assert found is None or all(piece in strands for piece in found)
