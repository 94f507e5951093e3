"""Bytes on standard output as they come."""

import sys
from collections.abc import Iterable, Iterator, Sequence


def write_as_they_come(prompts: Sequence[bytes], pieces: Iterable[list[bytes]]) -> list[bytes]:
    """Write the first prompt as it goes on, and the others once all have ended.

    Then lines do not mix.

    Args:
      prompts: at least one.
      pieces: the next bytes of each, as of `jaxblt.inference.generate(stream=True)`.

    Returns:
      The bytes behind each prompt.
    """
    parts: list[list[bytes]] = [[] for _ in prompts]

    def first() -> Iterator[bytes]:
        yield prompts[0]
        for piece in pieces:
            for part, new in zip(parts, piece, strict=True):
                part.append(new)
            yield piece[0]

    for text in whole_characters(first()):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")
    found = [b"".join(part) for part in parts]
    for prompt, continuation in zip(prompts[1:], found[1:], strict=True):
        sys.stdout.buffer.write(prompt + continuation + b"\n")
    return found


def whole_characters(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes, with pieces that end between characters of UTF-8.

    A character that a piece cuts is held until its last byte is there.
    """
    held = b""
    for piece in pieces:
        text = held + piece
        cut = len(text) - _begun(text)
        held = text[cut:]
        if cut:
            yield text[:cut]
    if held:
        yield held


def _begun(text: bytes) -> int:
    """Count the bytes at the end of `text` that begin a character of UTF-8 without ending it."""
    for count in range(1, min(3, len(text)) + 1):
        byte = text[-count]
        if byte >= 0xC0:
            needed = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return count if count < needed else 0
        if byte < 0x80:
            return 0
    return 0
