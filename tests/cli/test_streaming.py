"""Bytes written as they come: the same bytes, whole characters at a time, lines that do not mix."""

import pytest

from jaxblt.cli.streaming import whole_characters, write_as_they_come

TEXT = "aé€😀".encode() + b"\xff\xe2\x82b\xc3"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_are_whole(size):
    """Bytes that are no UTF-8 pass too; the last ones, which begin a character, come at the end."""
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    found = list(whole_characters(pieces))
    assert b"".join(found) == TEXT
    assert all(found)
    held = b""
    for piece in found[:-1]:
        held += piece
        if len(held) <= len("aé€😀".encode()):
            held.decode()


def test_characters_are_not_held_longer_than_needed():
    assert list(whole_characters([b"a\xe2", b"\x82", b"\xac", b"b"])) == [b"a", "€".encode(), b"b"]
    assert list(whole_characters([b"\x80\x80\x80\x80", b"c"])) == [b"\x80\x80\x80\x80", b"c"]


def test_the_first_prompt_comes_first(capsysbinary):
    found = write_as_they_come([b"one", b"two"], [[b"\xc3", b"x"], [b"\xa9", b"y"]])
    assert found == ["é".encode(), b"xy"]
    assert capsysbinary.readouterr().out == "oneé\ntwoxy\n".encode()
