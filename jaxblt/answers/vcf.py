"""Variants from a VCF file, row by row (VCF 4.1 to 4.4; sec. 1.6.1 of 4.3)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxblt.data.sources.files import expand_one
from jaxblt.data.sources.opening import name_of, read_lines

BASES = frozenset("ACGTNacgtn")
FIRST = 5
"""Columns that say what is changed where: CHROM, POS, ID, REF and ALT."""
_FIXED = ("qual", "filter", "info", "format")


class Variant(NamedTuple):
    """One alternate allele.

    Attributes:
      chrom: name of the reference record.
      pos: of the reference allele's first base, from 1.
      id: of the row, "." for none.
      ref: reference allele.
      alt: alternate allele.
      rest: what the row holds behind ALT: QUAL, FILTER, INFO, FORMAT and samples, as many as the file has columns. They
        are of the row: what INFO and samples say of several alleles stays together.
    """

    chrom: str
    pos: int
    id: str
    ref: str
    alt: str
    rest: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.chrom}:{self.pos} {self.ref}>{self.alt}"


@dataclass(frozen=True)
class VcfFile:
    """A VCF file, which is read anew by each pass over its variants and never held.

    Attributes:
      path: of the file.
      columns: names of the columns behind ALT, in lower case except for samples.
    """

    path: Path
    columns: tuple[str, ...]

    def alleles(self) -> Iterator[tuple[str, Variant]]:
        """Return each alternate allele, and the file and line that it stands in.

        Raises:
          ValueError: there is no row, one lacks a column or has more than the file names, or its POS is no number.
        """
        where = ""
        for number, line in enumerate(read_lines(self.path), start=1):
            if line.strip() and not line.startswith("#"):
                where = f"{name_of(self.path)!r}, line {number}"
                for variant in self._variants(line.split("\t"), where):
                    yield where, variant
        if not where:
            raise no_variant(self.path)

    def _variants(self, cells: list[str], where: str) -> Iterator[Variant]:
        if not FIRST <= len(cells) <= FIRST + len(self.columns):
            raise ValueError(
                f"{where}: expected at least 5 columns with tabs between (CHROM, POS, ID, REF, ALT), and at most "
                f"{FIRST + len(self.columns)}, which its first lines have, got {len(cells)}"
            )
        chrom, pos, name, ref, alts = cells[:FIRST]
        if not (pos.isascii() and pos.isdigit()):
            raise ValueError(f"{where}: POS must be a whole number from 0, got {pos!r}")
        missing = FIRST + len(self.columns) - len(cells)
        rest = (*cells[FIRST:], *["."] * missing)
        for alt in alts.split(","):
            yield Variant(chrom, int(pos), name, ref, alt.strip(), rest)


def open_vcf(path: str | os.PathLike[str]) -> VcfFile:
    """Open a VCF file, plain or compressed; a pipe is copied to a temporary file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, damaged or holds no row.
    """
    file = expand_one(path)
    for line in read_lines(file):
        if line.startswith("#CHROM\t"):
            names = line.split("\t")[FIRST:]
            return VcfFile(file, (*map(str.lower, names[:4]), *names[4:]))
        if line.strip() and not line.startswith("#"):
            count = max(len(line.split("\t")) - FIRST, _FIXED.index("format"))
            samples = (f"sample_{i + 1}" for i in range(count - len(_FIXED)))
            return VcfFile(file, (*_FIXED[:count], *samples))
    raise no_variant(file)


def no_variant(file: Path) -> ValueError:
    """Return the error of a VCF file without a row."""
    return ValueError(f"{name_of(file)!r} holds no variant: expected rows of CHROM, POS, ID, REF, ALT")


def read_vcf(path: str | os.PathLike[str]) -> Iterator[Variant]:
    """Return the variants of a VCF file, one for each alternate allele of a row.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, damaged or holds no variant; a row is broken; or an allele has no sequence.
    """
    for where, variant in open_vcf(path).alleles():
        if (kind := unscored_kind(variant)) is not None:
            raise unscored(where, variant, kind)
        yield variant


def unscored_kind(variant: Variant) -> str | None:
    """Return the kind of an allele without a sequence to score, or None if it has one."""
    alt = variant.alt
    if alt == "*":
        return "spanning deletion (*)"
    if alt == ".":
        return "no alternate allele (.)"
    if alt in ("<NON_REF>", "<*>"):
        return "any other allele (<NON_REF>, <*>)"
    if alt.startswith("<"):
        return "symbolic allele"
    if any(mark in alt for mark in "[]") or alt.startswith(".") or alt.endswith("."):
        return "breakend"
    if not all(allele and BASES.issuperset(allele) for allele in (variant.ref, alt)):
        return "allele of other letters than ACGTN"
    if not variant.pos:
        return "telomere (POS 0)"
    return "ALT equal to REF" if alt.upper() == variant.ref.upper() else None


def unscored(where: str, variant: Variant, kind: str) -> ValueError:
    """Return the error of an allele that has no score."""
    return ValueError(
        f"{where}, {variant}: {kind}, which has no score: leave the row out, or skip and count all such alleles "
        "(--skip, skip=True)"
    )
