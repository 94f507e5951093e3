"""Files as documents: every byte, wherever it lies, and errors that say what to do."""

import bz2
import gzip
import lzma
import os
import re
from pathlib import Path

import pytest

from jaxblt.data import ChangedFileWarning, FastaSource, JsonlSource, TextSource, read_document
from jaxblt.data.sources import files
from jaxblt.data.sources.files import expand
from tests.data.naive import ALL_BYTES


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(ALL_BYTES * 3 + b"\r\n\xff\xfe")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(ALL_BYTES + b"gz"))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"xz" + ALL_BYTES))
    return tmp_path


def test_every_byte_survives_in_every_format(folder):
    source = TextSource(str(folder / "*"))
    assert [name.rsplit("/")[-1] for name in source.names] == ["a.txt.gz", "b.txt", "c.txt.xz"]
    expected = [ALL_BYTES + b"gz", ALL_BYTES * 3 + b"\r\n\xff\xfe", b"xz" + ALL_BYTES]
    assert [read_document(source, i) for i in range(3)] == expected
    assert source.lengths.tolist() == [len(x) for x in expected]


def test_any_slice_equals_the_slice_of_the_file(folder):
    source = TextSource(str(folder / "*"))
    for i in range(3):
        full = read_document(source, i)
        for start in range(0, len(full), 37):
            for stop in range(start, len(full), 53):
                assert source.read(i, start, stop) == full[start:stop]


def test_paths_keep_their_order_and_occur_once(folder):
    paths = [folder / "c.txt.xz", str(folder / "*.txt*"), folder / "b.txt"]
    assert [p.name for p in expand(paths)] == ["c.txt.xz", "a.txt.gz", "b.txt"]


def test_a_file_that_is_named_in_two_ways_occurs_once(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert [p.name for p in expand(["b.txt", folder / "b.txt", "../" + folder.name + "/b.txt"])] == ["b.txt"]


@pytest.mark.parametrize("kinds", [("", ".gz"), ("", ".xz"), (".gz", ".xz")])
def test_a_compressed_copy_is_not_read_beside_its_file(tmp_path, kinds):
    for kind in kinds:
        (tmp_path / f"a.txt{kind}").write_bytes(b"1")
    first, second = (re.escape(str(tmp_path / f"a.txt{kind}")) for kind in kinds)
    with pytest.raises(ValueError, match=f"'{first}' and '{second}' are one file twice"):
        TextSource(tmp_path / "*")
    assert len(expand(tmp_path / f"a.txt{kinds[1]}")) == 1


def test_a_file_whose_name_holds_glob_characters_is_itself(tmp_path):
    (tmp_path / "x[1].txt").write_bytes(b"1")
    assert [p.name for p in expand(tmp_path / "x[1].txt")] == ["x[1].txt"]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 10**6)])
def test_reading_outside_is_an_error(folder, start, stop):
    with pytest.raises(IndexError, match=r"b.txt"):
        TextSource(folder / "b.txt").read(0, start, stop)
    with pytest.raises(IndexError, match="document 1 does not exist"):
        TextSource(folder / "b.txt").read(1, 0, 1)


def test_missing_files_and_folders(folder):
    with pytest.raises(FileNotFoundError, match=r"file does not exist.*nowhere\.txt"):
        TextSource(folder / "nowhere.txt")
    with pytest.raises(FileNotFoundError, match=r"glob matches no file.*\*\.md"):
        TextSource(folder / "*.md")
    with pytest.raises(IsADirectoryError, match="is a folder: name its files"):
        TextSource(folder)
    with pytest.raises(ValueError, match="no path was given"):
        TextSource([])


def test_what_is_inside_decides_and_not_the_name(folder):
    text, files = b"text \r\n" + ALL_BYTES, {"g": gzip.compress, "x.txt": lzma.compress, "b": bz2.compress}
    for name, compress in files.items():
        (folder / name).write_bytes(compress(text))
        assert read_document(TextSource(folder / name), 0) == text
        assert read_document(TextSource(folder / name, raw=True), 0) == compress(text)


def test_a_file_that_shrinks_during_a_run_is_noticed(folder):
    source = TextSource(folder / "b.txt")
    (folder / "b.txt").write_bytes(b"short")
    with (
        pytest.warns(ChangedFileWarning),
        pytest.raises(OSError, match="became shorter while it was in use"),
    ):
        source.read(0, 0, 100)


JSON = b'{"text": "%s"}\n'


@pytest.mark.parametrize("how", ["written", "replaced"])
@pytest.mark.parametrize(
    ("source", "wrap"),
    [(TextSource, b"%s"), (JsonlSource, JSON), (FastaSource, b">a\n%s\n")],
    ids=["text", "jsonl", "fasta"],
)
def test_a_file_that_is_rewritten_at_its_length_is_told_of(source, wrap, how, tmp_path, recwarn):
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    file.write_bytes(wrap % b"ACGT")
    before = file.stat().st_mtime_ns
    opened = source(file)
    assert opened.read(0, 0, 4) == b"ACGT"
    other.write_bytes(wrap % b"TTTT")
    if how == "replaced":
        os.utime(other, ns=(before, before))
        other.replace(file)
    else:
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(before + 1, before + 1))
    assert not recwarn.list
    with pytest.warns(
        ChangedFileWarning, match=r"a\.txt' was changed while it was in use: do not change data"
    ):
        assert opened.read(0, 0, 4) == b"TTTT"


def test_folders_of_a_glob_that_exist_are_taken_by_their_names(tmp_path: Path) -> None:
    for name in ("lr=[1]", "lr=1", "a"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "x.txt").write_bytes(name.encode())
    for pattern in ("lr=[1]/deep/*.txt", "lr=[1]/**/*.txt", "lr=[1]/deep/x.txt"):
        assert [f.read_bytes() for f in expand(tmp_path / pattern)] == [b"lr=[1]"]
    assert [f.read_bytes() for f in expand(tmp_path / "[ab]/deep/*")] == [b"a"]
    with pytest.raises(FileNotFoundError, match="glob matches no file"):
        expand(tmp_path / "lr=[1]" / "*.csv")


def test_a_folder_that_links_lead_back_to_is_read_once(tmp_path: Path) -> None:
    """`**` follows links, and would read each file forty times."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    assert expand(str(tmp_path / "**/*.txt")) == [tmp_path / "a.txt", tmp_path / "b.txt"]


def test_of_two_paths_of_one_length_the_first_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder lists its files in any order, and names decide in which order files are read."""
    (tmp_path / "b").mkdir()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b" / "x.txt").write_text("one")
    found = [str(tmp_path / name / "x.txt") for name in "ab"]
    for listed in (found, found[::-1]):
        monkeypatch.setattr(files, "_glob", lambda pattern, listed=listed: listed)
        assert expand("*/x.txt") == [tmp_path / "a" / "x.txt"]


def test_links_to_a_folder_are_followed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of each of a million files, the file system would answer for minutes."""
    asked: list[str] = []
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: asked.append(path) or real(path))
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("one")
    assert len(expand(str(tmp_path / "*.txt"))) == 20
    assert len(asked) <= 2


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    for name in ("gone.txt", "self.txt"):
        (tmp_path / "self.txt").unlink(missing_ok=True)
        (tmp_path / "self.txt").symlink_to(name)
        for path in ("self.txt", "*.txt"):
            with pytest.raises(
                FileNotFoundError, match=rf"self.txt' is a link to '{name}', which leads to no file"
            ):
                expand(str(tmp_path / path))
