"""Data sets are fetched from a server of this process: checked, never overwritten, never half-written."""

import fnmatch
import hashlib
import lzma
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from jaxblt import recipes
from jaxblt.cli import data
from jaxblt.cli.catalogue import Dataset, Download, catalogue, dataset_of, fetch_hint, files_of, folder_of
from jaxblt.cli.download import LOCK, rewrapped

GENOME = b">one\nACGT" + b"ACGTAC\n" * 30
BASES = b"ACGT" + b"ACGTAC" * 30
STORED = b">x\n" + b"".join(BASES[i : i + 60] + b"\n" for i in range(0, len(BASES), 60))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.txt").write_bytes(b"words")
    (tmp_path / "served" / "g.fa").write_bytes(GENOME)
    handler = partial(Quiet, directory=str(tmp_path / "served"))
    with HTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def dataset(*files: Download) -> Dataset:
    return Dataset("small", "a few files", "free", files)


def words(server: str, sha256: str | None) -> Download:
    return Download("text/a.txt", f"{server}/a.txt", 5, sha256)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def test_files_are_fetched_once_and_checked(server, capsys):
    genome = Download("g.fa.xz", f"{server}/g.fa", len(STORED), sha256(STORED), ">x")
    small = dataset(words(server, sha256(b"words")), genome)
    data.fetch(small)
    assert Path("data/small/text/a.txt").read_bytes() == b"words"
    assert lzma.decompress(Path("data/small/g.fa.xz").read_bytes()) == STORED
    assert "2 files (2 new)" in capsys.readouterr().out
    data.fetch(small)
    assert "2 files (0 new)" in capsys.readouterr().out
    assert len(files()) == 5
    Path("data/small/text/a.txt").write_bytes(b"mine!")
    with pytest.raises(ValueError, match=r"a.txt has SHA-256 \w+, expected \w+: move it away"):
        data.fetch(small)
    assert Path("data/small/text/a.txt").read_bytes() == b"mine!"


def test_another_file_than_expected_is_not_kept(server):
    with pytest.raises(ValueError, match=r"a.txt has SHA-256 \w+, expected 0+: it is another file now"):
        data.fetch(dataset(words(server, "0" * 64)))
    with pytest.raises(ValueError, match="has more than 4 bytes: it is no longer the file that is meant"):
        data.fetch(dataset(Download("b.txt", f"{server}/a.txt", 2, "0" * 64)))
    assert not [path for path in files() if Path(path).is_file()]


def test_a_checksum_that_nobody_knows_is_recorded_and_holds_from_then_on(server, tmp_path, capsys):
    small = dataset(words(server, None))
    data.fetch(small)
    known = sha256(b"words")
    assert Path("data/small", LOCK).read_text() == f"{known}  text/a.txt\n"
    assert f"no checksum of text/a.txt was known: it has SHA-256 {known}" in capsys.readouterr().out
    Path("data/small/text/a.txt").unlink()
    (tmp_path / "served" / "a.txt").write_bytes(b"other")
    with pytest.raises(ValueError, match=f"expected {known}: it is another file now"):
        data.fetch(small)
    Path("data/small/text/a.txt").write_bytes(b"words")
    data.fetch(small)


@pytest.mark.parametrize("away", ["/none.txt", None], ids=["no such file", "nobody answers"])
def test_without_network_one_line_says_what_to_put_where(server, away):
    url = f"{server}{away}" if away else "http://127.0.0.1:1/a.txt"
    with pytest.raises(
        OSError, match=r"127.0.0.1 does not answer .*: run `jaxblt data fetch small` where"
    ) as told:
        data.fetch(dataset(Download("a.txt", url, 5, "0" * 64)))
    assert f"the first is data/small/a.txt (SHA-256 {'0' * 64}) from {url}" in str(told.value)
    assert "\n" not in str(told.value)
    assert files() == []


def test_a_record_is_wrapped_again_whatever_its_pieces():
    for size in (1, 7, 1000):
        chunks = (GENOME[i : i + size] for i in range(0, len(GENOME), size))
        assert b"".join(rewrapped(chunks, ">x")) == STORED


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_no_recipe_names_files_that_nobody_can_get(name, capsys):
    """Each pattern of a recipe finds files of a data set; a recipe without files has embedded or made data."""
    recipe = recipes.get(name)
    patterns = files_of(recipe)
    found = dataset_of(recipe)
    folder = folder_of(recipe)
    if folder in {*data.MADE, *data.BROUGHT}:
        assert f"jaxblt data fetch {folder}" in fetch_hint(recipe)
        return
    assert (found is None) == (not patterns)
    if found is None:
        assert data.find(name) is None
        assert fetch_hint(recipe) == ""
        assert "nothing to fetch" in capsys.readouterr().out
        return
    paths = [str(found.folder / file.path) for file in found.files]
    for pattern in patterns:
        assert fnmatch.filter(paths, pattern) or any(path.startswith(f"{pattern}/") for path in paths)
    assert data.find(name) == found
    assert fetch_hint(recipe) == f"; `jaxblt data fetch {found.name}` makes {found.folder}"


def test_the_catalogue_is_sound():
    for found in catalogue().values():
        assert len({file.path for file in found.files}) == len(found.files)
        for file in found.files:
            assert file.url.startswith("https://")
            assert not Path(file.path).is_absolute()
            assert ".." not in Path(file.path).parts
            assert file.sha256 is None or (len(file.sha256) == 64 and file.size)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["fetch", "bookz"],
            r"no data set and no recipe 'bookz' \(perhaps books\), choose one of: babi, books",
        ),
        (["fetch"], "name what to fetch: babi"),
        (["get", "books"], "unknown action 'get': jaxblt data fetch NAME"),
    ],
)
def test_bad_command_lines(argv, says):
    with pytest.raises(ValueError, match=says):
        data.main(argv)


def test_the_help_lists_data_sets_with_their_recipes(capsys):
    assert data.main(["--help"]) == 0
    assert "also books_entropy, books_32k" in capsys.readouterr().out
    assert data.main([]) == 2


def test_a_sheet_of_a_recipes_images_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "cifar10_gray"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        np.save(folder / f"{part}_x.npy", np.full((20, 32, 32), 7, np.uint8))
        np.save(folder / f"{part}_y.npy", np.arange(20, dtype=np.uint8) % 10)
    assert data.main(["draw", "cifar10_gray", "sheet.png"]) == 0
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "row k shows class k" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match=r"sheet\.png is there .* overwritten: choose another name$"):
        data.main(["draw", "cifar10_gray", "sheet.png"])
    with pytest.raises(ValueError, match="recipe 'mqar' reads no images, choose one of: pathfinder"):
        data.main(["draw", "mqar", "other.png"])
    with pytest.raises(ValueError, match=r"expected a recipe and a file, got \['pathfinder'\]"):
        data.main(["draw", "pathfinder"])
    with pytest.raises(FileNotFoundError, match=r"`jaxblt data fetch pathfinder` makes data.pathfinder"):
        data.main(["draw", "pathfinder", "other.png"])


def test_what_is_drawn_is_written_and_what_is_brought_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(data.MADE, "listops", lambda folder: folder.mkdir(parents=True))
    assert data.main(["fetch", "listops"]) == 0
    assert "drawn" in capsys.readouterr().out
    assert data.main(["fetch", "listops"]) == 0
    assert "there already" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["listops"]
    with pytest.raises(ValueError, match=r"put into data.imdb train\*\.tsv"):
        data.main(["fetch", "imdb"])
