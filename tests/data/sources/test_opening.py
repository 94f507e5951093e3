"""What every reader shares: bounds of what is decompressed, files of globs without a byte, and pipes."""

import gzip
import os
import shutil
import threading
from types import SimpleNamespace

import pytest

from jaxblt.answers import read_vcf
from jaxblt.answers.records import open_records
from jaxblt.data import (
    DataConfig,
    EmptyFileWarning,
    FastaSource,
    JsonlSource,
    TextSource,
    read_bed,
    read_document,
)
from jaxblt.data.sources import opening, pipes
from jaxblt.data.sources.files import expand, expand_one
from jaxblt.data.sources.tables import read_table

DATA = DataConfig(seq_len=8)


def read(source):
    return [read_document(source, i) for i in range(len(source))]


@pytest.mark.parametrize(
    "open_file",
    [TextSource, FastaSource, JsonlSource, lambda path: list(read_table(path, ","))],
    ids=["text", "fasta", "jsonl", "table"],
)
def test_a_bomb_is_refused_before_it_fills_memory(tmp_path, monkeypatch, open_file):
    """20 KB that hold 20 MB: no more than a MiB beyond the bound is decompressed."""
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(20 << 20)))
    monkeypatch.setattr(opening, "FREE", 1 << 20)
    taken, read_some = [], gzip.GzipFile.read

    def counted(file, size=-1):
        taken.append(read_some(file, size))
        return taken[-1]

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    with pytest.raises(
        ValueError, match=r"bomb.gz' of 20,\d+ bytes holds more than 2,\d+,\d+ once decompressed"
    ):
        open_file(path)
    assert sum(map(len, taken)) < 4 << 20


def test_how_far_a_file_may_expand_is_an_option(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"A" * 100_000))
    monkeypatch.setattr(opening, "FREE", 10)
    for said in ("5", "0"):
        monkeypatch.setenv("JAXBLT_EXPANSION", said)
        with pytest.raises(ValueError, match="or set JAXBLT_EXPANSION to how many times"):
            TextSource(path)
    monkeypatch.setenv("JAXBLT_EXPANSION", "1000")
    assert TextSource(path).lengths.tolist() == [100_000]
    monkeypatch.setattr(opening, "_memory", lambda: 100_000)
    with pytest.raises(ValueError, match=r"holds more than 25,000 once decompressed \(1000 times its size"):
        TextSource(path)
    plain = tmp_path / "a.csv"
    plain.write_bytes(b"A" * 100_000)
    assert len(list(read_table(plain, ","))) == 1
    monkeypatch.setenv("JAXBLT_EXPANSION", "a lot")
    with pytest.raises(ValueError, match="JAXBLT_EXPANSION must be a whole number, got 'a lot'"):
        TextSource(path)


def test_lines_are_read_one_after_the_other_and_bounded(tmp_path, monkeypatch):
    path = tmp_path / "a.vcf.gz"
    path.write_bytes(gzip.compress(b"c\t1\t.\tA\tG\n" + bytes(1 << 16)))
    monkeypatch.setattr(opening, "MOST_LINE", 1 << 10)
    found = read_vcf(path)
    assert str(next(found)) == "c:1 A>G"
    with pytest.raises(
        ValueError, match=r"a.vcf.gz' has a line of 1,024 characters or more: is it a file of lines"
    ):
        next(found)


def test_empty_files_of_a_glob_are_left_out_counted_and_named(tmp_path):
    for name, data in {
        "a.txt": b"one",
        "b.txt": b"",
        "c.txt.gz": gzip.compress(b""),
        "d.txt": b"\xef\xbb\xbf",
        "e.txt.gz": gzip.compress(b"two"),
        "f.txt.gz": b"\x1f\x8b\x08",
    }.items():
        (tmp_path / name).write_bytes(data)
    with pytest.warns(
        EmptyFileWarning, match=r"3 of 5 files of '.*/\[a-e\]\*' are empty and left out: .*b.txt, .*c.txt"
    ):
        assert read(TextSource(tmp_path / "[a-e]*")) == [b"one", b"two"]
    with pytest.raises(ValueError, match=r"b.txt' is empty \(0 bytes\)"):
        TextSource(tmp_path / "[b-d]*")
    with pytest.raises(ValueError, match=r"b.txt' is empty \(0 bytes\)"):
        TextSource([tmp_path / "a.txt", tmp_path / "b.txt"])
    with pytest.raises(ValueError, match=r"f.txt.gz' is damaged or not a whole gzip file"):
        TextSource(tmp_path / "[ef]*")


def test_where_one_file_is_read_a_glob_names_one(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.bed").write_text("c\t0\t1\n")
    assert expand_one(tmp_path / "a*").name == "a.bed"
    with pytest.raises(ValueError, match=r"\*.bed' names 2 files, where one is read: name one of them"):
        read_bed(tmp_path / "*.bed")


@pytest.fixture
def pipe(tmp_path):
    """A pipe as a shell makes it, `<(...)`: the path of its reading end, and bytes that come while it is read."""
    ends = []

    def make(data):
        reading, writing = os.pipe()
        ends.append(reading)

        def write():
            with os.fdopen(writing, "wb") as file:
                file.write(data)

        threading.Thread(target=write, daemon=True).start()
        return f"/dev/fd/{reading}"

    yield make
    for end in ends:
        os.close(end)


def test_pipes_are_read_as_files_are(pipe, monkeypatch):
    """The first byte tells what they hold; each can be named again, and what is copied is removed at the end."""
    removed = []
    monkeypatch.setattr(
        pipes, "atexit", SimpleNamespace(register=lambda *call, **options: removed.append(call))
    )
    text, lines = pipe(b"ACGT" * 100_000), pipe(b'{"text": "a"}\n')
    fasta = pipe(gzip.compress(b">a\nAC\n>b\nG\n"))
    source = open_records(text, DATA)
    assert (list(source.names), source.lengths.tolist()) == ([text], [400_000])
    assert source.read(0, 399_998, 400_000) == b"GT"
    assert read(open_records(text, DATA)) == read(source)
    assert read(open_records(fasta, DATA)) == [b"AC", b"G"]
    assert read(FastaSource(fasta)) == [b"AC", b"G"]
    assert read(open_records(lines, DATA)) == read(JsonlSource(lines)) == [b"a"]
    assert [v.alt for v in read_vcf(pipe(b"c\t1\t.\tA\tG,T\n"))] == ["G", "T"]
    assert [x.record for x in read_bed(pipe(b"c\t0\t1\n"))] == ["c"]
    empty = pipe(b"")
    with pytest.raises(ValueError, match=rf"'{empty}' is empty \(0 bytes\)"):
        open_records(empty, DATA)
    assert len(removed) == 6
    for call, folder in removed:
        assert call is shutil.rmtree
        call(folder)
        assert not os.path.exists(folder)


def test_a_pipe_without_end_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(pipes, "MOST_SPOOLED", 1 << 16)
    path = pipe(b"A" * (1 << 17))
    with pytest.raises(
        OSError, match=rf"the pipe '{path}' holds more than 65,536 bytes: write them to a file"
    ):
        expand(path)
