"""Runs that come with jaxblt: unpacked once, by hash, and never in front of a folder of that name."""

import json

import numpy as np
import pytest

import jaxblt
from jaxblt import boxed
from jaxblt.cli.main import main

TEXT = b"It was a dark evening, and the old gentleman had gone to his room without a word to anybody."


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxblt" / "boxed"


def test_english_knows_english(cache):
    """Far fewer bits than a byte has, and fewer than for the same letters in another order."""
    run = jaxblt.load("english")
    (folder,) = cache.iterdir()
    assert folder.name.startswith("english-")
    mixed = bytes(np.random.default_rng(0).permutation(np.frombuffer(TEXT, np.uint8)))
    bits = -run.score([TEXT, mixed]).log_likelihood / np.log(2) / len(TEXT)
    assert bits[0] < 2.5 < 4 < bits[1]


def test_an_archive_that_changed_is_refused(cache, monkeypatch, tmp_path):
    (tmp_path / "english.zip").write_bytes(b"PK" + bytes(1000))
    monkeypatch.setattr(boxed, "HERE", tmp_path)
    monkeypatch.setattr(boxed, "boxed", lambda: {"english": {"sha256": "0" * 64}})
    with pytest.raises(
        ValueError, match=r"english\.zip has the SHA-256 [0-9a-f]{16}\.\.\., expected 0{16}\.\.\.: install"
    ):
        boxed.unpacked("english")
    assert not list(cache.iterdir())


def test_a_folder_of_that_name_goes_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert boxed.is_boxed("english")
    (tmp_path / "english").mkdir()
    assert not boxed.is_boxed("english")
    with pytest.raises(FileNotFoundError):
        jaxblt.load("english")


def test_commands_list_runs_and_write_cards(cache, tmp_path, capsys):
    main(["models"])
    assert "english  English prose" in capsys.readouterr().out
    main(["card", "english", "--out", str(tmp_path / "card.md")])
    text = (tmp_path / "card.md").read_text(encoding="utf-8")
    about = json.loads((boxed.HERE / "boxed.json").read_text(encoding="utf-8"))["english"]
    assert all(line in text for line in (about["data"], about["limits"], "7,206,224 parameters"))
    with pytest.raises(FileExistsError, match="--overwrite"):
        main(["card", "english", "--out", str(tmp_path / "card.md")])
