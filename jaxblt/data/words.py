"""Words of records: all runs of k letters, by which near-copies are known.

Letters are compared without their case. In DNA and RNA, U is T, and words with a letter other than A, C, G, T do not
count. A word and its reverse complement may count as one. A record without a word is one word: the whole of it.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["dna", "protein", "text"]
LENGTHS: dict[Kind, int] = {"dna": 21, "protein": 5, "text": 16}
"""Letters of the words that near-copies share and other records do not."""

BASES = b"ACGT"
DNA, PROTEIN = b"ACGTUN", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ*-."
"""Letters that DNA, RNA and proteins nearly all consist of."""
LEAST_DNA, LEAST_PROTEIN = 0.9, 0.99
"""The shares of them from which on records are DNA or proteins."""
MOST_CODE = 1 << 62


class Windows(NamedTuple):
    """Words where they stand.

    Attributes:
      record: Int[W], number of the record.
      code: Int[W], equal for equal words, and different for others.
      base: letters that words are made of. A word's code over `base` is the code of the word without its last letter,
        while base^k is at most `MOST_CODE`.
    """

    record: np.ndarray
    code: np.ndarray
    base: int


def kind_of(sequences: Sequence[bytes]) -> Kind:
    """Return what the records are, by their letters: DNA or RNA, proteins, or text."""
    counts = np.bincount(_letters(sequences), minlength=256)
    total = max(int(counts.sum()), 1)
    if counts[list(DNA)].sum() >= LEAST_DNA * total:
        return "dna"
    return "protein" if counts[list(PROTEIN)].sum() >= LEAST_PROTEIN * total else "text"


def find_words(sequences: Sequence[bytes], length: int, kind: Kind, *, both_strands: bool) -> Windows:
    """Return the words of all records, in order.

    Args:
      sequences: of the records.
      length: letters of a word.
      kind: of the records.
      both_strands: of DNA, take the smaller code of a word and its reverse complement.
    """
    letters = _letters(sequences)
    if kind == "dna":
        codes = np.full(256, -1, np.int64)
        codes[list(BASES + b"U")] = 0, 1, 2, 3, 3
        base = len(BASES)
    else:
        there = np.bincount(letters, minlength=256) > 0
        codes, base = np.cumsum(there) - 1, max(int(there.sum()), 2)
    sizes = np.fromiter(map(len, sequences), np.int64, len(sequences))
    record = np.repeat(np.arange(len(sizes)), sizes)
    begins = np.arange(len(letters) - length + 1)
    if not len(begins):
        return Windows(record[:0], record[:0], base)
    digits = codes[letters]
    bad = np.concatenate([[0], np.cumsum(digits < 0)])
    inside = begins + length <= np.cumsum(sizes)[record[begins]]
    kept = inside & (bad[length:] == bad[: len(begins)])
    code = _strand_codes(np.maximum(digits, 0), length, both_strands and kind == "dna", base)
    return Windows(record[begins][kept], code[kept], base)


class WordSets(NamedTuple):
    """The different words of each record.

    Attributes:
      sizes: Int[N], how many each record has; one at the least.
      shared: Int32[V, N], ones where a record has a word, of those words that two records have.
    """

    sizes: np.ndarray
    shared: Any


def word_sets(sequences: Sequence[bytes], length: int, kind: Kind) -> WordSets:
    """Return which words records have; on both strands of DNA."""
    record, code, _ = find_words(sequences, length, kind, both_strands=True)
    without = np.flatnonzero(np.bincount(record, minlength=len(sequences)) == 0).tolist()
    whole = [_folded(sequences[i], kind) for i in without]
    below_zero = {name: ~i for i, name in enumerate(dict.fromkeys(whole))}
    record = np.append(record, np.array(without, np.int64))
    code = np.append(code, np.array([below_zero[name] for name in whole], np.int64))
    order = np.argsort(code, kind="stable")  # of a record's equal words one stands behind the other
    code, record = code[order], record[order]
    first = _changes(code) | _changes(record)
    code, record = code[first], record[first]
    holders = np.diff(np.append(np.flatnonzero(_changes(code)), len(code)))
    kept, ends = np.repeat(holders > 1, holders), np.cumsum(holders[holders > 1])
    ones, shape = np.ones(int(kept.sum()), np.int32), (len(ends), len(sequences))
    from scipy.sparse import csr_matrix  # here, as few runs look for words

    shared = csr_matrix((ones, record[kept], np.append(0, ends)), shape=shape)
    return WordSets(np.bincount(record, minlength=len(sequences)), shared)


def _changes(values: np.ndarray) -> np.ndarray:
    """Return where a value is another one than that before it."""
    return np.concatenate([np.ones(min(len(values), 1), bool), values[1:] != values[:-1]])


def _letters(sequences: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(sequences).upper(), np.uint8)


def _folded(sequence: bytes, kind: Kind) -> bytes:
    """Return a sequence as it is compared."""
    upper = sequence.upper()
    if kind != "dna":
        return upper
    upper = upper.replace(b"U", b"T")
    return min(upper, upper.translate(bytes.maketrans(b"ACGT", b"TGCA"))[::-1])


def _strand_codes(digits: np.ndarray, length: int, both: bool, base: int) -> np.ndarray:
    if not both:
        return _window_codes(digits, base, length)
    # Code both strands at once: codes are numbered anew where words are too long for 62 bits.
    codes = _window_codes(np.concatenate([digits, (base - 1 - digits)[::-1]]), base, length)
    count = len(digits) - length + 1
    return np.minimum(codes[:count], codes[-count:][::-1])


def _window_codes(digits: np.ndarray, base: int, length: int) -> np.ndarray:
    """Number each window of `length` digits; equal windows, and no others, have equal numbers.

    Windows are put together of shorter ones, by the binary digits of `length`.
    """
    codes, size, width = digits, base, 1
    for bit in f"{length:b}"[1:]:
        codes, size = _joined(codes, size, codes[width:], size)
        width *= 2
        if bit == "1":
            codes, size = _joined(codes, size, digits[width:], base)
            width += 1
    return codes


def _joined(left: np.ndarray, left_size: int, right: np.ndarray, right_size: int) -> tuple[np.ndarray, int]:
    """Code windows side by side; also returns the codes' bound.

    Codes that exceed 62 bits are numbered anew.
    """
    if left_size * right_size > MOST_CODE:
        left, left_size = _numbered(left)
        right, right_size = _numbered(right)
    return left[: len(right)] * right_size + right, left_size * right_size


def _numbered(codes: np.ndarray) -> tuple[np.ndarray, int]:
    found, numbers = np.unique(codes, return_inverse=True)
    return numbers.astype(np.int64), len(found)
