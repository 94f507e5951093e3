"""Variants from a VCF file: the five columns that say what is changed where (VCF 4.3, sec. 1.6.1)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxblt.data.sources.files import expand, read_all

BASES = frozenset(b"ACGTNacgtn")


class Variant(NamedTuple):
    """One alternate allele.

    Attributes:
      chrom: name of the reference record.
      pos: of the reference allele's first base, from 1.
      id: of the row, "." for none.
      ref: reference allele.
      alt: alternate allele.
    """

    chrom: str
    pos: int
    id: str
    ref: str
    alt: str

    def __str__(self) -> str:
        return f"{self.chrom}:{self.pos} {self.ref}>{self.alt}"


def read_vcf(path: str | os.PathLike[str]) -> Iterator[Variant]:
    """The variants of a VCF file, plain or `.gz`, one for each alternate allele of a row.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, damaged or holds no variant; a row is broken; or an allele is symbolic.
    """
    (file,) = expand(Path(path))
    count = 0
    for number, line in enumerate(read_all(file).splitlines(), start=1):
        if line.strip() and not line.startswith(b"#"):
            for variant in _variants(line, f"{str(file)!r}, line {number}"):
                count += 1
                yield variant
    if not count:
        raise ValueError(f"{str(file)!r} holds no variant: expected rows of CHROM, POS, ID, REF, ALT")


def _variants(line: bytes, where: str) -> Iterator[Variant]:
    columns = line.decode("utf-8", "replace").split("\t")
    if len(columns) < 5:
        raise ValueError(
            f"{where}: expected at least 5 columns with tabs between (CHROM, POS, ID, REF, ALT), got {len(columns)}"
        )
    chrom, pos, name, ref, alts = columns[:5]
    if not (pos.isascii() and pos.isdigit() and int(pos) > 0):
        raise ValueError(f"{where}: POS must be a whole number from 1, got {pos!r}")
    for alt in (each.strip() for each in alts.split(",")):
        for column, allele in (("REF", ref), ("ALT", alt)):
            _check_allele(allele, column, f"{where}, {chrom}:{pos}")
        yield Variant(chrom, int(pos), name, ref, alt)


def _check_allele(allele: str, column: str, where: str) -> None:
    if allele and BASES.issuperset(allele.encode()):
        return
    symbolic = column == "ALT" and (allele in ("*", ".") or any(mark in allele for mark in "<>[]"))
    what = "is symbolic" if symbolic else "is not of the letters ACGTN"
    raise ValueError(
        f"{where}: {column} allele {allele!r} {what}: only alleles written in bases have a sequence to score; leave "
        "the row out"
    )
