"""Terminals whose encoding lacks a character get another one in its place."""

import io
import sys

import pytest

from jaxblt.cli.main import main as jaxblt_main
from jaxblt.cli.parsing import run


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("latin-1", "strict", b"a?\xe9 ???"),
        ("ascii", "surrogateescape", b"a?? ???"),
        ("utf-8", "surrogateescape", "a│é 日本".encode() + b"\xff"),
    ],
)
def test_other_characters_stand_for_those_it_lacks(encoding, errors, shown, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["jaxblt"])
    with pytest.raises(SystemExit) as stopped:
        run(lambda argv: print("a│é 日本\udcff", end=""))
    terminal.flush()
    assert stopped.value.code == 0
    assert terminal.buffer.getvalue() == shown


@pytest.mark.slow(days=28, group="costly", turn="cli/test_terminal")
def test_help_and_patches_are_shown(tmp_path, monkeypatch):
    (tmp_path / "日本.txt").write_text("Hello brave new world. ")
    for words in (["evaluate", "--help"], ["patch", str(tmp_path / "日本.txt"), "--mode", "space"]):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "argv", ["jaxblt", *words])
        with pytest.raises(SystemExit) as stopped:
            run(jaxblt_main)
        terminal.flush()
        assert stopped.value.code == 0
        assert len(terminal.buffer.getvalue()) > 100
