"""An order-k byte model with interpolated modified Kneser-Ney smoothing: the classical baseline.

For a context c of j bytes and a next byte b, with counts a(c b),

    p_j(b | c) = (a(c b) - D[a(c b)] + G(c) * p_{j-1}(b | c without its oldest byte)) / a(c),
    p_{-1}(b) = 1 / 256,

where a(c) = sum_b a(c b), D takes one of three values for counts 1, 2 and 3 or more, and G(c) is what the
discounts of c's followers add up to, so that p_j sums to one. A context never seen passes to the shorter one.
At the top order a(.) are counts in the training bytes. Below it they are continuation counts, the number of different
bytes seen before c b.
Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (1999), section 3.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt64

from jaxblt.show import show

MAX_ORDER = 7  # 7 context bytes and the next one fill a 64-bit key


@dataclass(frozen=True)
class _Level:
    """The counts after contexts of one length; keys are bytes packed big-endian, sorted.

    grams: context and next byte; discounted: a - D[a] of each.
    contexts: contexts seen; total: a(c); spare: G(c).
    """

    grams: UInt64[np.ndarray, " grams"]
    discounted: Float[np.ndarray, " grams"]
    contexts: UInt64[np.ndarray, " contexts"]
    total: Float[np.ndarray, " contexts"]
    spare: Float[np.ndarray, " contexts"]


@dataclass(frozen=True)
class NgramModel:
    """A fitted model; `levels[j]` serves contexts of j bytes."""

    levels: tuple[_Level, ...]

    __repr__ = show

    @property
    def order(self) -> int:
        """Bytes of context."""
        return len(self.levels) - 1

    def bits(self, data: bytes, *, chunk: int = 1 << 20) -> Float[np.ndarray, " bytes"]:
        """Return -log2 p of each byte given those before it in `data`.

        The first ones have shorter contexts.
        """
        values = np.frombuffer(data, np.uint8)
        parts = [self._chunk_bits(values, start, start + chunk) for start in range(0, values.size, chunk)]
        return np.concatenate([np.zeros(0), *parts])

    def bits_per_byte(self, data: bytes) -> float:
        """Return the mean of `bits`.

        Raises:
          ValueError: no data.
        """
        if not data:
            raise ValueError("bits per byte need at least one byte: data is empty")
        return float(self.bits(data).mean())

    def distribution(self, context: bytes) -> Float[np.ndarray, " 256"]:
        """Return p(b | context) for all 256 bytes.

        Only the last `order` bytes of the context matter.
        """
        recent = context[-self.order :] if self.order else b""
        key = int.from_bytes(recent, "big")
        depths = np.full(256, len(recent))
        return self._probabilities(np.uint64(key << 8) | np.arange(256, dtype=np.uint64), depths)

    def _chunk_bits(self, values: np.ndarray, start: int, end: int) -> Float[np.ndarray, " chunk"]:
        end = min(end, values.size)
        first = max(0, start - self.order)
        keys = _pack(values[first:end], self.order)[start - first :]
        return -np.log2(self._probabilities(keys, np.minimum(np.arange(start, end), self.order)))

    def _probabilities(
        self, keys: UInt64[np.ndarray, " n"], depths: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """Return p of the last byte of each key after the `depths` bytes before it."""
        p = np.full(keys.shape, 1.0 / 256)
        for length, level in enumerate(self.levels):
            gram = keys & _low_bytes(length + 1)
            where, known = _find(level.contexts, gram >> np.uint64(8))
            known &= depths >= length
            at, seen = _find(level.grams, gram)
            count = np.where(seen, level.discounted[at], 0.0)
            total = np.where(known, level.total[where], 1.0)
            p = np.where(known, (count + level.spare[where] * p) / total, p)
        return p


def fit_ngram(data: bytes, *, order: int = 5) -> NgramModel:
    """Count and smooth the order-`order` model of `data`.

    It takes about 20 bytes of memory a byte of data.

    Raises:
      ValueError: order outside 0..7, or not more bytes than the order.
    """
    if not 0 <= order <= MAX_ORDER:
        raise ValueError(f"order must lie in 0..{MAX_ORDER}, got {order}")
    if len(data) <= order:
        raise ValueError(f"an order-{order} model needs more than {order} bytes, got {len(data)}")
    keys = _pack(np.frombuffer(data, np.uint8), order)[order:]
    grams, counts = np.unique(keys, return_counts=True)
    levels = [_level(grams, counts)]
    for length in range(order - 1, -1, -1):
        grams, counts = np.unique(grams & _low_bytes(length + 1), return_counts=True)
        levels.append(_level(grams, counts))
    return NgramModel(tuple(reversed(levels)))


def _level(grams: np.ndarray, counts: np.ndarray) -> _Level:
    discounts = _discounts(counts)
    taken = discounts[np.minimum(counts, 3) - 1]
    contexts, starts = np.unique(grams >> np.uint64(8), return_index=True)
    total = np.add.reduceat(counts.astype(np.float64), starts)
    spare = np.add.reduceat(taken, starts)
    return _Level(grams, counts - taken, contexts, total, spare)


def _discounts(counts: np.ndarray) -> Float[np.ndarray, " 3"]:
    """Return D for counts 1, 2 and 3+ (eq. 26).

    D_r = r - (r + 1) Y n_{r+1} / n_r, with Y = n_1 / (n_1 + 2 n_2). n_r is how many grams occur r times. Where n_1 or
    n_r is zero (a source without rare grams), or D is not positive, 0.5 is taken.
    """
    n1, n2, n3, n4 = (float(np.sum(counts == r)) for r in (1, 2, 3, 4))
    discounts = np.full(3, 0.5)
    for r, (here, above) in enumerate([(n1, n2), (n2, n3), (n3, n4)], start=1):
        estimate = r - (r + 1) * n1 / (n1 + 2 * n2) * above / here if n1 and here else 0.0
        discounts[r - 1] = estimate if estimate > 0 else 0.5
    return discounts


def _pack(values: np.ndarray, order: int) -> UInt64[np.ndarray, " n"]:
    """Pack each byte and the `order` before it as a big-endian integer; zeros come first."""
    keys = values.astype(np.uint64)
    for back in range(1, order + 1):
        keys[back:] |= values[:-back].astype(np.uint64) << np.uint64(8 * back)
    return keys


def _low_bytes(count: int) -> np.uint64:
    return np.uint64((1 << 8 * count) - 1)


def _find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices into the sorted table, always valid, and whether the key is really there."""
    where = np.minimum(np.searchsorted(table, keys), table.size - 1)
    return where, table[where] == keys
