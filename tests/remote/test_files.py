"""Data at URLs: read as the same files are here, each version downloaded once."""

import gc
import gzip
import sys
from pathlib import Path

import pytest

from jaxblt.answers.records import open_records
from jaxblt.data import DataConfig
from jaxblt.data.sources import FastaSource, JsonlSource, TextSource, open_bed
from jaxblt.remote import cache, download, list_files, remove, upload

FASTA = b">one\nACGT\nAC\n>two\nGG\n"
FILES = {
    "bucket/texts/a.txt": b"first text",
    "bucket/texts/b.txt": b"second",
    "bucket/texts/c.md": b"no match",
    "bucket/lines.jsonl": b'{"text": "a line"}\n{"text": "another"}\n',
    "bucket/genome.fa": FASTA,
    "bucket/genome.fa.gz": gzip.compress(FASTA),
    "bucket/parts.bed": b"one\t1\t4\n",
}


def texts(source):
    return [source.read(i, 0, int(n)) for i, n in enumerate(source.lengths)]


@pytest.fixture
def files(store):
    store.objects.update(FILES)
    return {"s3": "s3:/", "gs": "gs:/", "http": store.address}


@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
def test_all_kinds_of_data(files, scheme):
    root = f"{files[scheme]}/bucket"
    source = TextSource([f"{root}/texts/b.txt", Path(f"{root}/texts/a.txt")])
    assert texts(source) == [b"second", b"first text"]
    assert source.names == [f"{root}/texts/b.txt", f"{root}/texts/a.txt"]
    lines = JsonlSource(f"{root}/lines.jsonl")
    assert texts(lines) == [b"a line", b"another"]
    assert lines.names[1] == f"{root}/lines.jsonl:2"
    for name in ("genome.fa", "genome.fa.gz"):
        genome = FastaSource(f"{root}/{name}")
        assert texts(genome) == [b"ACGTAC", b"GG"]
        assert texts(open_records(f"{root}/{name}", DataConfig(seq_len=8))) == texts(genome)
    assert texts(open_bed(genome, f"{root}/parts.bed")) == [b"CGT"]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_globs(files, scheme):
    assert texts(TextSource(f"{scheme}://bucket/texts/*.txt")) == [b"first text", b"second"]
    with pytest.raises(FileNotFoundError, match=f"glob matches no file: '{scheme}://bucket/texts/\\*.fa'"):
        TextSource(f"{scheme}://bucket/texts/*.fa")


def test_a_version_is_downloaded_once(files, store, monkeypatch):
    saved = []
    original = cache.save
    monkeypatch.setattr(cache, "save", lambda *a, **k: (saved.append(a), original(*a, **k)))
    url = "s3://bucket/texts/a.txt"
    first = TextSource(url)
    assert texts(TextSource(url)) == texts(first) == [b"first text"]
    store.objects["bucket/texts/a.txt"] = b"other text"
    assert texts(TextSource(url)) == [b"other text"]
    assert texts(first) == [b"first text"]
    assert len(saved) == 2


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("s3://bucket/texts/none.txt", FileNotFoundError, "s3://bucket/texts/none.txt does not exist"),
        ("s3://bucket/texts", IsADirectoryError, "s3://bucket/texts is a folder: name its files"),
        ("http/bucket/none.txt", FileNotFoundError, "/bucket/none.txt cannot be read: 404"),
        ("s3://bucket/empty.txt", ValueError, "'s3://bucket/empty.txt' is empty"),
    ],
)
def test_what_is_not_there(files, store, path, kind, words):
    store.objects["bucket/empty.txt"] = b""
    with pytest.raises(kind, match=words) as caught:
        TextSource(path.replace("http/", f"{store.address}/"))
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:9/a cannot be reached"):
        TextSource("http://127.0.0.1:9/a")
    assert not list(tmp_path.rglob("*"))


def test_a_file_system_of_one_host_is_told_which_and_leaves_nothing_behind(monkeypatch):
    gc.freeze()  # Keep the collection below from all that other tests left
    left: list = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)
    with pytest.raises(
        OSError, match=r"ftp://127\.0\.0\.1:9/a/b cannot be reached, .*: ConnectionRefusedError"
    ) as caught:
        list_files("ftp://127.0.0.1:9/a/b")
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()
    assert not left


@pytest.mark.parametrize("scheme", ["s3", "gs", "memory"])
def test_files_go_there_and_back(store, tmp_path, scheme):
    (tmp_path / "a").write_bytes(b"some bytes")
    url = f"{scheme}://box/folder"
    for name in ("x", "deep/y"):
        upload(tmp_path / "a", f"{url}/{name}")
    assert {name: file.size for name, file in list_files(url).items()} == {"x": 10, "deep/y": 10}
    assert all(file.version for file in list_files(url).values())
    download(f"{url}/deep/y", tmp_path / "sub" / "b")
    assert (tmp_path / "sub" / "b").read_bytes() == b"some bytes"
    for _ in range(2):
        remove(f"{url}/x")
    assert list(list_files(url)) == ["deep/y"]
    remove(f"{url}/deep/y")
    assert list_files(url) == {}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_large_file_goes_in_parts(store, tmp_path, scheme):
    data = bytes(range(256)) * (13 << 12)
    (tmp_path / "a").write_bytes(data)
    upload(tmp_path / "a", f"{scheme}://box/large")
    assert store.objects["box/large"] == data
    download(f"{scheme}://box/large", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data


def test_a_web_server_lists_nothing(store):
    with pytest.raises(ValueError, match=r"http://127.* cannot be listed: name a folder of s3://"):
        list_files(f"{store.address}/bucket")
