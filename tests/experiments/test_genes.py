"""Parts of genes by family: reading frames by hand, families of planted relatives, nothing shared between parts."""

from pathlib import Path

import numpy as np

from experiments import genes

CODONS = [bytes([a, b, c]) for a in b"TCAG" for b in b"TCAG" for c in b"TCAG"]


def _gene(rng: np.random.Generator, codons: int) -> bytes:
    inner = [codon for codon in CODONS if codon not in genes.STOPS]
    return b"ATG" + b"".join(inner[i] for i in rng.integers(len(inner), size=codons)) + b"TAA"


def test_frames_and_proteins_by_hand() -> None:
    assert genes.protein_of(b"GTGTTTTGGTAA") == b"MFW"
    good = b"ATG" + b"TTC" * 60 + b"TGA"
    assert genes.is_reading_frame(good)
    for bad in (
        good[1:],
        good[:-3],
        good.replace(b"TTC", b"TAG", 1),
        good.replace(b"TTC", b"TTN", 1),
        b"ATGTAA",
    ):
        assert not genes.is_reading_frame(bad)


def test_relatives_are_one_family_and_go_to_one_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [_gene(rng, 150) for _ in range(40)]
    records += [gene[:210] + _gene(rng, 79)[3:] for gene in records[:20]]  # Share half of their codons
    families = genes.families_of([genes.protein_of(gene) for gene in records])
    assert (families[:20] == families[40:]).all()
    assert len(set(families[:40].tolist())) == 40
    file = tmp_path / "markers.fasta"
    file.write_bytes(b"".join(b">%d\n%s\n" % (i, gene) for i, gene in enumerate(records)))
    genes.write_parts(file, tmp_path, bases=1e5)
    written = {p.stem: p.read_bytes().split() for p in (tmp_path / "genes").glob("*.fa")}
    assert sorted(line for lines in written.values() for line in lines if line[:1] != b">") == sorted(records)
    assert all(
        name.startswith(b">" + part.encode()) for part, lines in written.items() for name in lines[::2]
    )
