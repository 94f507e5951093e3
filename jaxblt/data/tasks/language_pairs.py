"""Pairs of excerpts of the embedded declaration of human rights, for `TextPairs`: are both of one language?"""

import re
from pathlib import Path

from jaxblt.data.draws import Draws
from jaxblt.data.samples import sample_source
from jaxblt.outputs import whole_file

EXCERPT = 62
"""Bytes of an excerpt: two of them with BOS and both EOS fill 127 positions."""
PARTS = {"train": (0.0, 0.8), "eval": (0.8, 0.9), "test": (0.9, 1.0)}
"""The share of each text that a table takes its excerpts from."""


def write_language_pairs(folder: Path, pairs: dict[str, int]) -> None:
    """Write `language_pairs.{train,eval,test}.tsv`: half of the pairs are of one language.

    The first excerpt is from the first half of a table's part of a text, and the second from the second half. So two
    excerpts of one language share no byte.

    Args:
      folder: for the tables; it is made.
      pairs: of each table.
    """
    # Keep an excerpt from ending a line or a column of its table.
    texts = [re.sub(rb"\s+", b" ", text) for text in sample_source("udhr").documents]
    for number, (part, count) in enumerate(pairs.items()):
        lines = [_pair(texts, part, Draws(number, line)) for line in range(count)]
        with whole_file(folder / f"language_pairs.{part}.tsv") as partial:
            partial.write_bytes(b"".join(lines))


def _pair(texts: list[bytes], part: str, draws: Draws) -> bytes:
    label, first = draws.between(0, 1), draws.between(0, len(texts) - 1)
    other = draws.between(1, len(texts) - 1)
    second = first if label else (first + other) % len(texts)
    excerpts = [_excerpt(texts[which], part, half, draws) for half, which in enumerate((first, second))]
    return b"\t".join([b"%d" % label, b"%d" % first, b"%d" % second, *excerpts]) + b"\n"


def _excerpt(text: bytes, part: str, half: int, draws: Draws) -> bytes:
    begin, end = (int(share * len(text)) for share in PARTS[part])
    middle = (begin + end) // 2
    low, high = ((begin, middle), (middle, end))[half]
    start = draws.between(low, high - EXCERPT)
    return text[start : start + EXCERPT]
