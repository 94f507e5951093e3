"""A reversible k-mer vocabulary: k-mers where the alphabet holds, bytes everywhere else."""

from dataclasses import dataclass

import numpy as np

from jaxblt.data.vocab import OFFSET, VOCAB_SIZE, check_whole
from jaxblt.validation import check_bounds, check_fields


@dataclass(frozen=True)
class KmerVocab:
    """Ids of the byte vocabulary (0..259), then one id for each of the |alphabet|^k k-mers.

    A run of r ≥ k letters of the alphabet becomes k-mers at offsets 0, s, 2s, ... with s = stride. Letters that
    are left over at its end become bytes. So do all bytes outside the alphabet, such as N, IUPAC codes and lower
    case. Therefore `decode(encode(x)) == x` for every x. Neighbouring k-mers belong to one run and overlap by
    k - s letters.

    Attributes:
      k: number of letters in a k-mer.
      stride: number of letters from the start of one k-mer to the next, 1..k; k means no overlap.
      alphabet: the letters, each once.

    Raises:
      ValueError: stride outside 1..k, a letter twice, or more than 2^31 ids.
    """

    k: int = 3
    stride: int = 3
    alphabet: bytes = b"ACGT"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "k", least=1, most=31)
        if not 1 <= self.stride <= self.k:
            raise ValueError(
                f"stride must lie in 1..k = 1..{self.k} (more would lose letters), got {self.stride}"
            )
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet must name each letter once, got {self.alphabet!r}")
        if self.size > 2**31:
            raise ValueError(
                f"k={self.k} over {len(self.alphabet)} letters is {self.size} ids, more than int32 holds"
            )

    @property
    def size(self) -> int:
        """The number of ids."""
        return VOCAB_SIZE + len(self.alphabet) ** self.k

    @property
    def _weights(self) -> np.ndarray:
        return len(self.alphabet) ** np.arange(self.k - 1, -1, -1, dtype=np.int64)

    def encode(self, data: bytes) -> np.ndarray:
        """Return Int32 ids of `data`."""
        codes = np.full(256, -1, np.int64)
        codes[list(self.alphabet)] = np.arange(len(self.alphabet))
        letters = codes[np.frombuffer(data, np.uint8)]
        is_kmer, is_byte = self._cut(letters >= 0)
        ids = np.frombuffer(data, np.uint8).astype(np.int64) + OFFSET
        starts = np.flatnonzero(is_kmer)
        ids[starts] = VOCAB_SIZE + letters[starts[:, None] + np.arange(self.k)] @ self._weights
        return ids[is_kmer | is_byte].astype(np.int32)

    def _cut(self, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where k-mers start and which positions are bytes, given where letters are."""
        edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        kmers = np.where(lengths >= self.k, (lengths - self.k) // self.stride + 1, 0)
        covered = np.where(kmers > 0, (kmers - 1) * self.stride + self.k, 0)
        first = np.zeros(len(inside), np.int64)
        first[starts] = 1
        run = np.cumsum(first) - 1  # -1 before the first run: the zero appended below
        offset = np.arange(len(inside)) - np.append(starts, 0)[run]
        last = np.append((kmers - 1) * self.stride, 0)[run]
        is_kmer = inside & (offset % self.stride == 0) & (offset <= last)
        is_byte = ~inside | (offset >= np.append(covered, 0)[run])
        return is_kmer, is_byte

    def decode(self, ids: np.ndarray) -> bytes:
        """Return the bytes that `ids` stand for; special ids are dropped.

        Raises:
          ValueError: an id lies outside the vocabulary.
        """
        check_whole("ids", np.asarray(ids))
        ids = np.asarray(ids, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.size):
            raise ValueError(f"ids must lie in 0..{self.size - 1}, got {ids.min()}..{ids.max()}")
        ids = ids[ids >= OFFSET]
        is_kmer = ids >= VOCAB_SIZE
        overlapped = is_kmer & np.append(is_kmer[1:], False)
        kept = np.where(is_kmer, np.where(overlapped, self.stride, self.k), 1)
        letters = np.zeros((len(ids), self.k), np.uint8)
        letters[~is_kmer, 0] = ids[~is_kmer] - OFFSET
        digits = (ids[is_kmer, None] - VOCAB_SIZE) // self._weights % len(self.alphabet)
        letters[is_kmer] = np.frombuffer(self.alphabet, np.uint8)[digits]
        return letters[np.arange(self.k) < kept[:, None]].tobytes()
