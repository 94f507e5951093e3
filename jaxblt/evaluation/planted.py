"""Texts with known (planted) boundaries, to test rules on: runs of a letter, random regions, motifs."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool

from jaxblt.data.sources import BytesSource
from jaxblt.validation import whole

Kind = Literal["runs", "regions", "motifs"]
MOTIF = b"TATAAT"
"""The motif that `planted("motifs", ...)` plants."""
BASES = b"ACGT"
RUN_LETTERS = b"abcdefgh"


class Planted(NamedTuple):
    """Texts, and at which of their bytes a patch should end.

    Attributes:
      source: the texts.
      boundaries: Bool[length] of each.
    """

    source: BytesSource
    boundaries: list[Bool[np.ndarray, "L"]]


def planted(kind: Kind, *, documents: int, length: int, seed: int = 0) -> Planted:
    """Draw texts with boundaries.

      runs     a letter 3 to 9 times, then another; a patch should end with the first byte of each run but the first,
               where content changes
      regions  16 to 32 random bases, then a random word of 2 to 4 bases over 16 to 32 bytes; a patch should end before
               each base that is drawn, the word's first copy included, as entropy is high there
      motifs   `MOTIF` behind 4 to 16 random bases, again and again; a patch should end with each motif

    Args:
      kind: of the texts.
      documents: texts.
      length: bytes of each.
      seed: of the draws.

    Raises:
      ValueError: the kind is unknown, or a number is out of range.
    """
    if kind not in PIECES:
        raise ValueError(f"kind must be one of {', '.join(PIECES)}, got {kind!r}")
    whole("documents", documents, least=1)
    whole("length", length, least=1)
    rng = np.random.default_rng(seed)
    texts, marks = zip(*(_text(PIECES[kind], rng, length) for _ in range(documents)), strict=True)
    return Planted(BytesSource(texts), list(marks))


Piece = Callable[[np.random.Generator, bytes], tuple[bytes, list[bool]]]
"""Draws the next piece of a text, given what came before, and marks its boundaries."""


def _text(piece: Piece, rng: np.random.Generator, length: int) -> tuple[bytes, Bool[np.ndarray, "L"]]:
    text, marks = b"", []
    while len(text) <= length:
        more, ends = piece(rng, text)
        text, marks = text + more, marks + ends
    return text[:length], np.array(marks[:length])


def _run(rng: np.random.Generator, before: bytes) -> tuple[bytes, list[bool]]:
    others = [letter for letter in RUN_LETTERS if letter != (before or b" ")[-1]]
    count = int(rng.integers(3, 10))
    return bytes([rng.choice(others)]) * count, [bool(before)] + [False] * (count - 1)


def _region(rng: np.random.Generator, before: bytes) -> tuple[bytes, list[bool]]:
    del before
    random = _bases(rng, int(rng.integers(16, 33)))
    word, count = _bases(rng, int(rng.integers(2, 5))), int(rng.integers(16, 33))
    # Mark the byte before each drawn base; the one before the region's first ends the piece before it
    drawn = len(random) + len(word)
    marks = [True] * (drawn - 1) + [False] * (count - len(word)) + [True]
    return random + (word * count)[:count], marks


def _motif(rng: np.random.Generator, before: bytes) -> tuple[bytes, list[bool]]:
    del before
    between = _bases(rng, int(rng.integers(4, 17)))
    return between + MOTIF, [False] * (len(between) + len(MOTIF) - 1) + [True]


def _bases(rng: np.random.Generator, count: int) -> bytes:
    return bytes(rng.choice(np.frombuffer(BASES, np.uint8), count))


PIECES: dict[str, Piece] = {"runs": _run, "regions": _region, "motifs": _motif}
