"""FASTA records: the same bases from plain and compressed files, at random, padded, case and codes kept."""

import gzip
import lzma
import os
import pickle

import pytest

from jaxblt.data import ChangedFileWarning, FastaSource, fetch, parse_fasta, read_document

RECORDS = {"chr1": b"ACGTNacgtnRYKM" * 11, "chr2": b"A", "empty": b"", "chr3": b"GATTACA" * 10}


def fasta(width=10, end=b"\n"):
    out = b"; a comment\n\n" if end == b"\n" else b""
    for name, bases in RECORDS.items():
        parts = [bases[i : i + width] for i in range(0, len(bases), width)]
        out += b">" + name.encode() + b" some words" + end + b"".join(p + end for p in parts)
    return out


@pytest.fixture
def write(tmp_path):
    def make(name, data=None):
        data = fasta() if data is None else data
        packed = {".gz": gzip.compress, ".xz": lzma.compress}.get(os.path.splitext(name)[1], bytes)(data)
        (tmp_path / name).write_bytes(packed)
        return tmp_path / name

    return make


@pytest.mark.parametrize("name", ["g.fa", "g.fa.gz", "g.fa.xz"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_every_base_at_random(write, name, end):
    source = FastaSource(write(name, fasta(end=end)))
    assert list(source.names) == list(RECORDS)
    assert [read_document(source, i) for i in range(len(source))] == list(RECORDS.values())
    bases = RECORDS["chr1"]
    for start in range(len(bases)):
        for stop in range(start, min(start + 25, len(bases))):
            assert source.read(0, start, stop) == bases[start:stop]


def test_lower_case_is_raised_on_request_alone(write):
    path = write("g.fa")
    assert read_document(FastaSource(path, soft_mask="upper"), 0) == RECORDS["chr1"].upper()
    with pytest.raises(ValueError, match="soft_mask must be"):
        FastaSource(path, soft_mask="lower")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("start", "stop"), [(-7, 3), (60, 90), (-5, 100), (-9, -2), (80, 85), (70, 70), (0, 0)]
)
def test_out_of_bounds_is_n(write, start, stop):
    source = FastaSource(write("g.fa"))
    bases = RECORDS["chr3"]
    expected = bytes(bases[i] if 0 <= i < len(bases) else ord("N") for i in range(start, stop))
    assert fetch(source, "chr3", start, stop) == expected
    if start < 0 or stop > len(bases):
        with pytest.raises(ValueError, match=r"leaves the record \[0, 70\): clip it, or pad with N"):
            fetch(source, "chr3", start, stop, pad=False)


def test_fetch_names_what_is_wrong(write):
    source = FastaSource(write("g.fa"))
    with pytest.raises(KeyError, match="no record 'chrX'; the source has chr1, chr2"):
        fetch(source, "chrX", 0, 1)
    with pytest.raises(ValueError, match="chr1:5-4 ends before it starts"):
        fetch(source, "chr1", 5, 4)


@pytest.mark.parametrize("name", ["bad.fa", "bad.fa.gz"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"; only a comment\n", "has no FASTA record: expected a line that starts with '>'"),
        (b"ACGT\n>x\nACGT\n", "has text before its first '>' line: is it a FASTA file"),
        (b"LOCUS       X 10 bp DNA\nORIGIN\n", "as GenBank or EMBL does, so write it as FASTA"),
        (b">\nACGT\n", "has a header without a name: b'>'"),
        (b">x\nAC\n>x\nGT\n", "FASTA record 'x' occurs twice"),
    ],
)
def test_bad_files_are_named(write, name, data, message):
    path = write(name, data)
    with pytest.raises(ValueError, match=message):
        FastaSource(path)


@pytest.mark.parametrize("lines", [1, 2, 4096])
def test_lines_of_any_length_are_read_as_the_packed_file_is(write, monkeypatch, lines):
    """Counted one by one and many at once; only what is regular gets an index beside it."""
    monkeypatch.setattr("jaxblt.data.sources.fasta_index.LINES", lines)
    even = b">x\n" + b"ACGT\n" * 9 + b"AC\n>y\nA\n"
    cases = {
        "even": (even, True),
        "blank at the end": (even + b"\n\n", True),
        "no line end": (even[:-1], True),
        "a longer line": (even + b"ACGTA\n", False),
        "a shorter one before": (even.replace(b"ACGT", b"AC", 1), False),
        "a blank line inside": (even.replace(b"T\nA", b"T\n\nA", 1), False),
        "other line ends": (even.replace(b"\n", b"\r\n", 5), False),
        "blanks inside": (even.replace(b"AC", b"A C", 2), False),
        "a carriage return inside": (even.replace(b"ACGT\nAC", b"ACGT\rAC", 1), False),
        "old Mac": (even.replace(b"\n", b"\r"), False),
        "a record behind a carriage return": (even + b"ACG\r>z\rAC\n", False),
        "a character of three bytes": (">x\nMK\u2013V\n>y\nMM\n".encode(), True),
    }
    for number, (what, (data, is_indexed)) in enumerate(cases.items()):
        path = write(f"{number}.fa", data)
        for source in (FastaSource(path), FastaSource(path), FastaSource(write(f"{number}.fa.gz", data))):
            held = [(name, read_document(source, i)) for i, name in enumerate(source.names)]
            assert held == parse_fasta(data, what), what
            assert b"\r" not in b"".join(bases for _, bases in held)
        assert path.with_name(f"{number}.fa.fai").exists() == is_indexed, what


def test_an_index_of_characters_instead_of_bytes_is_noticed(write):
    """As tools write it that count letters: the record's last bytes would be lost."""
    path = write("p.fa", ">a\nMK\u2013V\n>b\nMM\n".encode())
    path.with_name("p.fa.fai").write_text("a\t4\t3\t4\t5\nb\t2\t13\t2\t3\n")
    with pytest.raises(OSError, match="and its index differ: delete"):
        read_document(FastaSource(path), 0)
    path.with_name("p.fa.fai").write_text("a\t4\t3\t4\n")
    with pytest.raises(ValueError, match=r"p.fa.fai' is no index of FASTA .*: delete it"):
        FastaSource(path)


def test_the_index_is_kept_beside_the_file_and_renewed(write):
    path = write("g.fa")
    FastaSource(path)
    index = path.with_name("g.fa.fai")
    assert index.exists()
    assert sorted(p.name for p in path.parent.iterdir()) == ["g.fa", "g.fa.fai"]
    path.write_bytes(b">new\nACGTACGT\n")
    os.utime(path, ns=(0, index.stat().st_mtime_ns + 10**9))
    assert read_document(FastaSource(path), 0) == b"ACGTACGT"


def test_an_index_of_another_file_is_noticed(write):
    path = write("g.fa")
    source = FastaSource(path)
    path.write_bytes(b">chr1\nACGT\n")
    with pytest.warns(ChangedFileWarning), pytest.raises(OSError, match="and its index differ: delete"):
        source.read(0, 0, 50)


def test_a_folder_that_cannot_be_written(write, monkeypatch):
    path = write("g.fa")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert read_document(FastaSource(path), 0) == RECORDS["chr1"]
    assert [p.name for p in path.parent.iterdir()] == ["g.fa"]


@pytest.mark.parametrize("other", [">chr1\nTTTTTTTTTTTTTTTTTTTTTTT\n", ">a long name\nACGTACGTACGTACGT\n"])
def test_an_older_file_in_the_place_of_the_indexed_one_is_not_read(tmp_path, other):
    """Its time does not tell that the index is of another one, and other bases would be read."""
    path = tmp_path / "g.fa"
    path.write_text(">a long name\nACGTACGTAC\n>b\nAC\n")
    FastaSource(path)
    path.write_text(other)
    os.utime(path, (1, 1))
    with pytest.raises(ValueError, match=r"g.fa.fai' is of another file than .*g.fa': at byte"):
        FastaSource(path)


@pytest.mark.parametrize("size", [10, 4094, 4095, 4096, 9000])
def test_headers_of_any_length_are_known_again(tmp_path, size):
    path = tmp_path / "g.fa"
    path.write_text(f">first\nAC\n>a {'x' * size}\nACGT\n")
    for _ in range(2):
        assert read_document(FastaSource(path), 1) == b"ACGT"


@pytest.mark.parametrize("space", ["\u00a0", "\u3000", "\x1c", "\t", " "])
def test_a_name_ends_at_any_space(tmp_path, space):
    path = tmp_path / "g.fa"
    path.write_text(f">a{space}long name\nACGT\n", encoding="utf-8")
    source = FastaSource(path)
    assert (list(source.names), read_document(source, 0)) == (["a"], b"ACGT")


def test_a_source_travels_to_another_process(write):
    source = pickle.loads(pickle.dumps(FastaSource(write("g.fa"))))
    assert source.read(3, 2, 9) == RECORDS["chr3"][2:9]
