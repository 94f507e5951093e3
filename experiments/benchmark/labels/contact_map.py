"""A Hi-C map beside its genome: chromosomes in bins, pairs of bins, and what a pair's distance leaves unexplained."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

LETTERS = np.full(256, -1, np.int64)
LETTERS[list(b"ACGT")] = np.arange(4)


@dataclass(frozen=True)
class Chromosome:
    """Bases of a chromosome, and the contacts of its bins with each other.

    Attributes:
      name: of the FASTA record.
      bases: in upper case.
      logs: log of balanced contacts of bins i and i + d at [i, d], d = 0 ... `farthest`; NaN where there is none.
    """

    name: str
    bases: bytes
    logs: Float[np.ndarray, "N E"]


def read_chromosomes(
    contacts: Path, genome: Path, nearest: int, farthest: int, *, bin_size: int
) -> list[Chromosome]:
    """Return the chromosomes of both files, with the pairs of bins `nearest` to `farthest` bins apart.

    A pair counts whose bins both have a weight, and whose count is above 0. It is multiplied by both weights (ICE).

    Args:
      contacts: npz of a Cooler's tables: chrom_names, bin_chrom, bin_weight, bin1, bin2 and count.
      genome: FASTA of the same names; may end in `.xz`.
      nearest, farthest: bins from one to the other.
      bin_size: bases of a bin.

    Raises:
      ValueError: no chromosome has a name of both files, or one has another number of bins than its bases fill.
    """
    from jaxblt.data.sources import parse_fasta
    from jaxblt.data.sources.opening import read_all

    bases = {name: text.upper() for name, text in parse_fasta(read_all(genome), str(genome))}
    table = np.load(contacts)
    names = [name.decode() for name in table["chrom_names"]]
    one, other, owner = table["bin1"].astype(int), table["bin2"].astype(int), table["bin_chrom"]
    weight, apart = table["bin_weight"], other - one
    balanced = table["count"] * weight[one] * weight[other]
    counts = (owner[one] == owner[other]) & (nearest <= apart) & (apart <= farthest) & (balanced > 0)
    logs = np.full((len(owner), farthest + 1), np.nan)
    logs[one[counts], apart[counts]] = np.log(balanced[counts])
    found = [Chromosome(name, bases[name], logs[owner == i]) for i, name in enumerate(names) if name in bases]
    if not found:
        raise ValueError(
            f"{genome} names none of the chromosomes {names}: take the genome that was mapped to"
        )
    for one in found:
        if len(one.logs) != (bins := -(-len(one.bases) // bin_size)):
            raise ValueError(
                f"{one.name} has {len(one.logs)} bins in {contacts} and fills {bins} of {bin_size} bases in {genome}: "
                "take the genome that was mapped to, or the map's --settings.bin-size"
            )
    return found


def deal(count: int, seed: int, held: int) -> dict[str, list[int]]:
    """Deal chromosomes to parts: `held` for test, as many for validation, all others for training."""
    order = np.random.default_rng(seed).permutation(count).tolist()
    return {"test": order[:held], "validation": order[held : 2 * held], "train": order[2 * held :]}


def expected(chromosomes: Sequence[Chromosome]) -> Float[np.ndarray, "E"]:
    """Return the mean log contact at each distance; NaN where there is no pair."""
    logs = np.concatenate([one.logs for one in chromosomes])
    there = np.isfinite(logs)
    total = np.where(there, logs, 0).sum(0)
    return np.where(there.any(0), total / np.maximum(there.sum(0), 1), np.nan)


def word_shares(bases: bytes, size: int, length: int) -> Float[np.ndarray, "W F"]:
    """Return the share of each word of `length` letters in every `size` bases, both strands added up."""
    codes = LETTERS[np.frombuffer(bases, np.uint8)]
    words, turned = np.zeros((2, len(codes) - length + 1), np.int64)
    for i in range(length):
        letter = codes[i : len(codes) - length + 1 + i]
        words, turned = 4 * words + letter, turned + (3 - letter) * 4**i
    whole = np.lib.stride_tricks.sliding_window_view(codes, length).min(1) >= 0
    window, kinds = np.arange(len(words)) // size, 4**length
    shape = (-(-len(codes) // size), kinds)
    counts = np.zeros(shape)
    for found in (words, turned):
        counts += np.bincount((window * kinds + found)[whole], minlength=shape[0] * kinds).reshape(shape)
    return counts / size


def middles_of_centromeres(file: Path, names: Sequence[str]) -> Float[np.ndarray, "C"]:
    """Return where the centromere of each chromosome lies, in bases, by SGD's table of features.

    The table numbers chromosomes from 1, in the order of the names.

    Raises:
      ValueError: a chromosome has none.
    """
    from jaxblt.data.sources.opening import read_all

    rows = csv.reader(
        read_all(file).decode("utf-8", "replace").splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE
    )
    found = {int(row[8]): (int(row[9]) + int(row[10])) / 2 for row in rows if row[1] == "centromere"}
    if lacking := [name for i, name in enumerate(names) if i + 1 not in found]:
        raise ValueError(f"{file} has no centromere of {lacking}: leave --features out")
    return np.array([found[i + 1] for i in range(len(names))])
