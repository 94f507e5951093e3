"""Bytes as text: where the character of each byte begins."""

import pytest

from jaxblt.inference.server.text import Text

BYTES = {
    "characters": ("aé日🎉b".encode(), [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]),
    "a sequence broken off by a letter": (b"a\xe3f\xe3\x80g", [0, 1, 2, 3, 3, 4]),
    "a sequence broken off by another": (b"\xe3\xe3\x80\x82\xf0\x9f\xc3\xa9", [0, 1, 1, 1, 2, 2, 3, 3]),
    "bytes that begin nothing": (b"\xff\x80\xf0\x80a", [0, 1, 2, 3, 4]),
}


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("name", BYTES)
def test_a_byte_has_the_offset_of_its_character(name: str, size: int) -> None:
    data, expected = BYTES[name]
    text, found, said = Text(), [], ""
    for i in range(0, len(data), size):
        piece = data[i : i + size]
        found += text.offsets(piece)
        said += text.add(piece, last=i + size >= len(data))
    assert found == expected
    assert said == data.decode(errors="replace")
    assert all(said[at] == chr(byte) for byte, at in zip(data, found, strict=True) if byte < 128)
