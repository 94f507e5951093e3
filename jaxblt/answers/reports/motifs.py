"""Motifs in the windows of records that answers rest on: where attributions are high, what letters recur there.

A motif is a model of W independent letters, p(letter j) = P[j], beside a background q of single letters. Windows of
high attribution are searched by expectation maximisation with one site a window at most (the ZOOPS model of Bailey and
Elkan 1994, ISMB 2:28), begun at the word that is most frequent there beside chance.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxblt.outputs import whole_file
from jaxblt.show import show
from jaxblt.validation import whole

ROUNDS = 20
"""The most rounds of expectation maximisation of a motif."""
SHUFFLES = 4
"""Times that windows are shuffled, to see what motifs chance makes."""
MARGIN = 10.0
"""Nats by which a motif has to be ahead of all of chance."""
SEEDS = 4
"""Words that a motif's search begins at; the likeliest result is kept."""
PSEUDOCOUNT = 0.5
"""Sites that are added to a motif's counts, dealt by the background."""
IUPAC = {
    "A": "A", "C": "C", "G": "G", "T": "T", "AG": "R", "CT": "Y", "CG": "S", "AT": "W", "GT": "K", "AC": "M",
    "CGT": "B", "AGT": "D", "ACT": "H", "ACG": "V", "ACGT": "N",
}  # fmt: skip
"""Code of a set of bases (IUPAC-IUB 1984)."""
LEAST_SITES = 4
"""Sites below which a motif is none."""
LEAST = 0.25
"""Share of a letter from which on it belongs to a place of the consensus."""


class Site(NamedTuple):
    """A place of a motif: number of the record, first byte of the site, and whether it is on the other strand."""

    record: int
    start: int
    reverse: bool


@dataclass(frozen=True, eq=False)
class Motif:
    """A motif.

    Attributes:
      alphabet: its letters, in the order of columns.
      pwm: Float64[W, A], probability of each letter at each place.
      background: Float64[A], of each letter in all records.
      sites: whose letters `pwm` counts.
    """

    alphabet: str
    pwm: np.ndarray
    background: np.ndarray
    sites: tuple[Site, ...] = ()

    __repr__ = show

    @property
    def consensus(self) -> str:
        """The letters of at least a quarter at each place: by IUPAC code for DNA, else the likeliest, or x for none."""
        if self.alphabet == "ACGT":
            held = ["".join(np.array(list("ACGT"))[row >= LEAST]) for row in self.pwm]
            return "".join(IUPAC.get(letters, "N") for letters in held)
        return "".join(self.alphabet[row.argmax()] if row.max() >= LEAST else "x" for row in self.pwm)

    @property
    def bits(self) -> np.ndarray:
        """Float64[W], information of each place beside the background: Σ p log2 (p / q)."""
        return (self.pwm * np.log2(np.maximum(self.pwm, 1e-12) / self.background)).sum(1)


def find_motifs(
    sequences: Sequence[bytes],
    values: Sequence[np.ndarray],
    *,
    width: int = 10,
    count: int = 3,
    windows: int = 200,
    alphabet: str = "ACGT",
    both_strands: bool = False,
) -> list[Motif]:
    """Return the motifs of the windows of highest attribution, those of most sites first.

    Windows of 2 `width` are taken one after the other by the sum of |values| of their middle, without overlaps. Sites
    of a motif are taken out before the next one is sought. The search ends at a motif of fewer than four sites, or one
    that makes windows hardly likelier than the best motifs of the same windows with their letters shuffled do.

    Args:
      sequences: records.
      values: attributions of their bytes, Float[L] each.
      width: letters of a motif.
      count: the most motifs.
      windows: the most windows, of all records.
      alphabet: letters of motifs; windows with another letter are left out.
      both_strands: of DNA, a site may lie on either strand.

    Raises:
      ValueError: a number is out of range, records and values do not go together, or no window holds letters alone.
    """
    for name, value, least in (("width", width, 3), ("count", count, 1), ("windows", windows, 4)):
        whole(name, value, least=least)
    if both_strands and alphabet != "ACGT":
        raise ValueError(f"both_strands is of DNA, and alphabet is {alphabet!r}: set it to False")
    lengths = [(len(s), len(v)) for s, v in zip(sequences, values, strict=True)]
    if wrong := [pair for pair in lengths if pair[0] != pair[1]]:
        raise ValueError(f"a record has {wrong[0][0]} bytes and {wrong[0][1]} values: give one a byte")
    digits = [_digits(record, alphabet) for record in sequences]
    letters = np.concatenate([d[d >= 0] for d in digits])
    background = (np.bincount(letters, minlength=len(alphabet)) + 1) / (len(letters) + len(alphabet))
    rows, places = choose_windows(digits, values, width, windows)
    if both_strands:
        background = (background + background[::-1]) / 2
    found, rng = [], np.random.default_rng(0)
    for _ in range(count):
        pwm, sites, likelihood = _search(rows, width, background, both_strands)
        shuffled = (rng.permuted(rows, axis=1) for _ in range(SHUFFLES))
        chance = max(_search(other, width, background, both_strands).likelihood for other in shuffled)
        if len(sites) < LEAST_SITES or likelihood <= chance + MARGIN:
            break
        told = tuple(Site(places[i][0], places[i][1] + start, reverse) for i, start, reverse in sites)
        found.append(Motif(alphabet, pwm, background, told))
        for i, start, _ in sites:
            rows[i, start : start + width] = -1
    return sorted(found, key=lambda motif: -len(motif.sites))


def choose_windows(
    digits: Sequence[np.ndarray], values: Sequence[np.ndarray], width: int, most: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return windows Int[N, 2 width] of the highest |values|, and record and first byte of each."""
    ranked, size = [], 2 * width
    for i, (row, own) in enumerate(zip(digits, values, strict=True)):
        if len(row) < size:
            continue
        held = np.convolve(np.abs(np.nan_to_num(own)), np.ones(width), "valid")[width // 2 :]
        ranked += [
            (float(held[t]), i, t) for t in range(len(row) - size + 1) if (row[t : t + size] >= 0).all()
        ]
    taken: dict[int, list[int]] = {}
    chosen = []
    for _, i, t in sorted(ranked, reverse=True):
        if all(abs(t - other) >= size for other in taken.get(i, ())):
            taken.setdefault(i, []).append(t)
            chosen.append((i, t))
        if len(chosen) == most:
            break
    if not chosen:
        raise ValueError(
            f"no record has {size} letters of the alphabet in a row: lower width = {width} (--motif-width)"
        )
    return np.stack([digits[i][t : t + size] for i, t in chosen]), chosen


def _digits(record: bytes, alphabet: str) -> np.ndarray:
    table = np.full(256, -1)
    for digit, letter in enumerate(alphabet):
        table[[ord(letter), ord(letter.lower())]] = digit
    return table[np.frombuffer(record, np.uint8)]


class _Words(NamedTuple):
    """All words of windows: digits Int[N, T, W], their letters one-hot Float[N, T, W A], and which are whole."""

    digits: np.ndarray
    letters: np.ndarray
    there: np.ndarray


class _Search(NamedTuple):
    """The likeliest motif of windows, its sites (window, start, strand), and the log-likelihood of all windows."""

    pwm: np.ndarray
    sites: list[tuple[int, int, bool]]
    likelihood: float


def _search(rows: np.ndarray, width: int, background: np.ndarray, both_strands: bool) -> _Search:
    """Return the likeliest motif of those that begin at the most frequent words."""
    digits = np.lib.stride_tricks.sliding_window_view(rows, width, axis=1)
    one_hot = (digits[..., None] == np.arange(len(background))).reshape(*digits.shape[:2], -1)
    words = _Words(digits, one_hot.astype(np.float64), (digits >= 0).all(2))
    best, most = np.tile(background, (width, 1)), -np.inf
    for seed in _seeds(words, background):
        pwm, total = np.tile(background, (width, 1)), -np.inf
        pwm[: len(seed)] = 0.7 * np.eye(len(background))[seed] + 0.3 * background
        for _ in range(ROUNDS):
            before = total
            share, total = _expect(words, pwm, background, both_strands)
            pwm = _maximise(words, share, background)
            if total - before < 0.01:
                break
        if total > most:
            best, most = pwm, total
    share, _ = _expect(words, best, background, both_strands)
    each = share.reshape(len(rows), -1)
    at, held = each.argmax(1), each.sum(1) > 0.5
    places = digits.shape[1]
    sites = [(int(i), int(at[i] % places), bool(at[i] >= places)) for i in np.flatnonzero(held)]
    return _Search(best, sites, most)


def _seeds(words: _Words, background: np.ndarray) -> list[np.ndarray]:
    """Return short words, those that are in more windows than chance has them first."""
    size = len(background)
    length = min(6 if size == 4 else 3, words.digits.shape[2])
    short = words.digits[..., :length][words.there]
    code = short @ size ** np.arange(length)
    window = np.broadcast_to(np.arange(len(words.there))[:, None], words.there.shape)[words.there]
    held = np.unique(np.stack([code, window], 1), axis=0)[:, 0]
    codes, counts = np.unique(held, return_counts=True)
    digits = codes[:, None] // size ** np.arange(length) % size
    expected = np.exp(np.log(background)[digits].sum(1)) * len(code)
    return list(digits[np.argsort(-counts * np.log(counts / expected))[:SEEDS]])


def _expect(
    words: _Words, pwm: np.ndarray, background: np.ndarray, both_strands: bool
) -> tuple[np.ndarray, float]:
    """Return the probability that a word is its window's site, Float[N, S, T] by strand, and the log-likelihood.

    A window has no site with probability 1/2, or one at any of its places, all as likely as another.
    """
    ratio = np.log(np.maximum(pwm, 1e-12) / background)
    models = [ratio, ratio[::-1, ::-1]] if both_strands else [ratio]
    odds = np.stack([np.where(words.there, np.exp(words.letters @ m.ravel()), 0) for m in models], 1)
    odds /= odds.shape[1] * odds.shape[2]
    total = 1 + odds.sum((1, 2), keepdims=True)
    return odds / total, float(np.log(total / 2).sum())


def _maximise(words: _Words, share: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Return the letters of words at each place, weighted by their shares; of the other strand turned round."""
    by_strand = np.einsum("nst,ntk->sk", share, words.letters).reshape(share.shape[1], -1, len(background))
    counts = by_strand[0] + PSEUDOCOUNT * background
    if len(by_strand) == 2:
        counts = counts + by_strand[1, ::-1, ::-1]
    return counts / counts.sum(1, keepdims=True)


def similarity(a: np.ndarray, b: np.ndarray, *, both_strands: bool = False) -> float:
    """Return the largest Pearson correlation of two PWMs Float[W, A], of all shifts that share half of the shorter.

    Args:
      a, b: probabilities, letters in the same order.
      both_strands: of DNA (A, C, G, T), turn `b` round as well.
    """
    turned = [b, b[::-1, ::-1]] if both_strands else [b]
    least = -(-min(len(a), len(b)) // 2)
    found = []
    for other in turned:
        for shift in range(least - len(other), len(a) - least + 1):
            x = a[max(shift, 0) : shift + len(other)]
            y = other[max(-shift, 0) :][: len(x)]
            found.append(float(np.corrcoef(x[: len(y)].ravel(), y.ravel())[0, 1]))
    return max(found)


def write_meme(path: str | os.PathLike[str], motifs: Sequence[Motif]) -> None:
    """Write motifs in the MEME format, version 4, which motif databases are searched with.

    Raises:
      ValueError: there is no motif.
    """
    if not motifs:
        raise ValueError("no motif was found, and a file of motifs holds at least one: give more records")
    first = motifs[0]
    pairs = " ".join(f"{a} {q:.4f}" for a, q in zip(first.alphabet, first.background, strict=True))
    lines = ["MEME version 4", "", f"ALPHABET= {first.alphabet}", "", "Background letter frequencies", pairs]
    for i, motif in enumerate(motifs, start=1):
        shape = f"alength= {len(motif.alphabet)} w= {len(motif.pwm)} nsites= {len(motif.sites)} E= 0"
        lines += ["", f"MOTIF {motif.consensus} motif-{i}", f"letter-probability matrix: {shape}"]
        lines += [" ".join(f"{p:.6f}" for p in row) for row in motif.pwm]
    with whole_file(path) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
