"""An order-k Markov model over a small alphabet, counted on both strands: the baseline for DNA."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jaxblt.show import show

BASES = b"ACGT"
MAX_ORDER = 12


@dataclass(frozen=True)
class MarkovModel:
    """log2 p(next base | last k bases), `table[context, base]`, bases in the order A, C, G, T."""

    table: Float[np.ndarray, "contexts 4"]

    __repr__ = show

    @property
    def order(self) -> int:
        """Bases of context."""
        return round(math.log(len(self.table), 4))

    def bits(self, sequence: bytes) -> Float[np.ndarray, " scored"]:
        """Return -log2 p of every base with `order` unambiguous bases before it.

        Other bases are left out. Upper and lower case are the same base; anything but ACGT is ambiguous.
        """
        grams = _grams(base_codes(sequence), self.order)
        return -self.table.reshape(-1)[grams]

    def bits_per_base(self, sequence: bytes) -> float:
        """Return the mean of `bits`.

        Raises:
          ValueError: no base of the sequence has a full unambiguous context.
        """
        bits = self.bits(sequence)
        if not bits.size:
            raise ValueError(f"no base has {self.order} unambiguous bases before it in {len(sequence)} bytes")
        return float(bits.mean())


def fit_markov(
    sequence: bytes, *, order: int, both_strands: bool = True, pseudocount: float = 1.0
) -> MarkovModel:
    """Fit p(b | c) = (n(c b) + pseudocount) / (n(c) + 4 * pseudocount).

    Counts are over ACGT only.

    Args:
      sequence: bases in either case; others (N, IUPAC codes, line breaks) interrupt the counting.
      order: bases of context, 0..12.
      both_strands: count the reverse complement as well.
      pseudocount: added to every count.

    Raises:
      ValueError: order outside 0..12 or pseudocount not positive.
    """
    if not 0 <= order <= MAX_ORDER:
        raise ValueError(f"order must lie in 0..{MAX_ORDER}, got {order}")
    if pseudocount <= 0:
        raise ValueError(
            f"pseudocount must be positive, or unseen bases cost infinite bits; got {pseudocount}"
        )
    codes = base_codes(sequence)
    strands = [codes, np.where(codes < 0, codes, 3 - codes)[::-1]] if both_strands else [codes]
    counts = sum(np.bincount(_grams(strand, order), minlength=4 ** (order + 1)) for strand in strands)
    smoothed = np.reshape(counts, (-1, 4)) + pseudocount
    return MarkovModel(np.log2(smoothed / smoothed.sum(-1, keepdims=True)))


def base_codes(sequence: bytes) -> Int[np.ndarray, " bases"]:
    """Return 0..3 for A, C, G, T in either case, -1 for any other byte.

    3 - code is the complement.
    """
    table = np.full(256, -1, np.int8)
    for code, base in enumerate(BASES):
        table[base] = table[base + 32] = code
    return table[np.frombuffer(sequence, np.uint8)]


def _grams(codes: Int[np.ndarray, " bases"], order: int) -> Int[np.ndarray, " scored"]:
    """Code context and base, in base 4, where all `order` + 1 bases are unambiguous."""
    count = max(0, codes.size - order)
    keys, valid = np.zeros(count, np.int32), np.ones(count, bool)
    for offset in range(order + 1):
        part = codes[offset : offset + count]
        keys = keys * 4 + part
        valid &= part >= 0
    return keys[valid]
