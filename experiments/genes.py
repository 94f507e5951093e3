"""Cut genes of microbes, and their proteins, into parts by family: python -m experiments.genes FASTA --out data.

The genes are those of Debian's package `metaphlan2-data` (MIT): /var/lib/metaphlan2-data/markers.fasta. The folder gets
genes/{train,validation,test}.fa and proteins/{train,validation,test}.fa, the same records in both.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from scipy.sparse import csgraph, csr_matrix

from jaxblt.data.words import find_words

STARTS, STOPS = (b"ATG", b"GTG", b"TTG"), (b"TAA", b"TAG", b"TGA")
AMINO_ACIDS = b"FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
"""Of the standard code, codons in the order TTT, TTC, TTA, TTG, TCT ... GGG."""
SHORTEST, LONGEST = 150, 6000
"""Bases of a gene that is taken."""
WORD, SAMPLED, HOLDERS = 6, 8, 64
"""Amino acids of a word; one word in so many is looked at; a word that more proteins have says nothing of a family."""
LEAST, SHARE = 2, 0.2
"""Sampled words that two proteins of one family share: so many, and this share of the one that has fewer."""


def read_genes(path: Path) -> Iterator[bytes]:
    """Yield the records of a FASTA file, one at a time."""
    lines: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b">"):
                yield b"".join(lines)
                lines = []
            else:
                lines.append(line.strip())
    yield b"".join(lines)


def is_reading_frame(gene: bytes) -> bool:
    """Return whether a record is one open reading frame of A, C, G and T, from its start codon to its stop."""
    if (
        not SHORTEST <= len(gene) <= LONGEST
        or len(gene) % 3
        or gene[:3] not in STARTS
        or gene[-3:] not in STOPS
    ):
        return False
    return not gene.translate(None, b"ACGT") and b"*" not in translate(gene)[:-1]


def translate(gene: bytes) -> bytes:
    """Return the amino acids of codons, * for a stop."""
    codes = np.zeros(256, np.int64)
    codes[list(b"TCAG")] = range(4)
    codons = codes[np.frombuffer(gene, np.uint8)].reshape(-1, 3) @ np.array([16, 4, 1])
    return np.frombuffer(AMINO_ACIDS, np.uint8)[codons].tobytes()


def protein_of(gene: bytes) -> bytes:
    """Return the protein of a reading frame: its first codon reads M, its stop is left out."""
    return b"M" + translate(gene)[1:-1]


def families_of(proteins: list[bytes]) -> np.ndarray:
    """Return the number of each protein's family: what shares words is linked, and what links reach."""
    record, code, _ = find_words(proteins, WORD, "protein", both_strands=False)
    kept = code * 0x9E3779B1 % (1 << 32) // SAMPLED % SAMPLED == 0
    found = np.unique(np.stack([code[kept], record[kept]]), axis=1)
    _, word, counts = np.unique(found[0], return_inverse=True, return_counts=True)
    kept = counts[word] <= HOLDERS
    has = csr_matrix(
        (np.ones(kept.sum(), np.int32), (found[1][kept], word[kept])), shape=(len(proteins), len(counts))
    )
    shared = (has @ has.T).tocoo()
    sizes = np.asarray(has.sum(1)).ravel()
    fewer = np.minimum(sizes[shared.row], sizes[shared.col])
    linked = shared.data >= np.maximum(SHARE * fewer, LEAST)
    graph = csr_matrix((shared.data[linked], (shared.row[linked], shared.col[linked])), shape=shared.shape)
    return csgraph.connected_components(graph, directed=False)[1]


def part_of(family: int, seed: int = 0) -> str:
    """Deal a family to a part: 1 % to validation, 1 % to test."""
    draw = int.from_bytes(hashlib.sha256(f"{seed}:{family}".encode()).digest()[:4], "big") % 100
    return {0: "validation", 1: "test"}.get(draw, "train")


def write_parts(
    fasta: Annotated[Path, tyro.conf.Positional], out: Path = Path("data"), bases: float = 2.4e8
) -> None:
    """Write the genes and proteins of each part.

    Args:
      fasta: markers.fasta.
      out: folder.
      bases: of genes to take, spread over the file.
    """
    genes = [gene for gene in read_genes(fasta) if is_reading_frame(gene)]
    order = np.random.default_rng(0).permutation(len(genes))
    kept = order[: np.searchsorted(np.cumsum([len(genes[i]) for i in order]), bases)]
    genes = [genes[i] for i in np.sort(kept)]
    proteins = [protein_of(gene) for gene in genes]
    families = families_of(proteins)
    print(
        f"{len(genes)} genes in {families.max() + 1} families, the largest of {np.bincount(families).max()}"
    )
    for name, records in (("genes", genes), ("proteins", proteins)):
        (out / name).mkdir(parents=True, exist_ok=True)
        files = {part: (out / name / f"{part}.fa").open("wb") for part in ("train", "validation", "test")}
        for i, (record, family) in enumerate(zip(records, families.tolist(), strict=True)):
            part = part_of(family)
            files[part].write(f">{part}/{i}\n".encode() + record + b"\n")
        for file in files.values():
            file.close()


if __name__ == "__main__":
    tyro.cli(write_parts)
