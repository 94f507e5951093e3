"""Effects of variants: how much likelier the alternate allele makes its surroundings than the reference does."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import TYPE_CHECKING

import numpy as np

from jaxblt.answers.reading import Reader
from jaxblt.answers.records import open_fasta
from jaxblt.answers.score import BATCH_SIZE, log_likelihoods, scoring_reader
from jaxblt.answers.strands import check_nucleotides
from jaxblt.answers.tables import write_tsv
from jaxblt.answers.vcf import Variant, read_vcf
from jaxblt.data.sources import BytesSource, DocumentSource, ReverseComplement
from jaxblt.data.sources.fasta import read_padded
from jaxblt.show import show
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jaxblt.run import Run

LONGEST_DEFAULT = 8192
"""Bytes of a window at the most where the caller does not say."""

AT_ONCE = 256
"""Variants whose windows are held in memory together."""


@dataclass(frozen=True, eq=False)
class VariantScores:
    """A row an alternate allele, in the order of the file.

    Attributes:
      variants: what is changed where.
      score_forward: Float64[N], nats: log p(window with alt) - log p(window with ref).
      score_reverse: Float64[N], the same of the windows' reverse complements.
      score: Float64[N], the mean of both; above 0 the model finds the alternate allele likelier.
    """

    variants: tuple[Variant, ...]
    score_forward: np.ndarray
    score_reverse: np.ndarray
    score: np.ndarray

    __repr__ = show

    def __len__(self) -> int:
        return len(self.variants)

    def to_tsv(self, path: str | os.PathLike[str]) -> None:
        """Writes columns chrom, pos, id, ref, alt, score_forward, score_reverse, score."""
        columns = ("score_forward", "score_reverse", "score")
        figures = zip(*(getattr(self, name).tolist() for name in columns), strict=True)
        rows = ((*variant, *numbers) for variant, numbers in zip(self.variants, figures, strict=True))
        write_tsv(path, (*Variant._fields, *columns), rows)


def variants(
    run: "Run",
    vcf: str | os.PathLike[str],
    fasta: str | os.PathLike[str] | DocumentSource,
    *,
    context: int | None = None,
    batch_size: int = BATCH_SIZE,
) -> VariantScores:
    """Log-likelihood ratios log p(alt) - log p(ref) of the variants of a VCF file, in nats.

    Both windows begin at the same base and have the same number of bytes, `context`. The longer allele stands in their
    middle; where the alleles differ in length, the window of the shorter one ends further to the right. At the ends of
    a chromosome windows are cut short, both alike. Only where the reference has too few bases to fill a window with the
    alleles in it, N stands for those that are missing.

    A window is scored as a record (see `jaxblt.answers.score`): BOS first, no EOS. The windows' reverse complements are
    scored too.

    Bases of the windows have the case that `open_records` gives to FASTA bases; alternate alleles have the case of the
    reference allele's first base. N is a byte like any other.

    Args:
      run: trained to predict the next byte.
      vcf: plain or `.gz`; rows with several alternate alleles are split.
      fasta: the reference, or its records.
      context: bytes of a window; None for the length of the run's training rows, at most 8,192.
      batch_size: windows that are read at once.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: there is no such chromosome; the reference allele is not what the FASTA file holds; an allele is
        symbolic or longer than a window; or a log-likelihood is not finite.
    """
    size = min(run.recipe.data.seq_len, LONGEST_DEFAULT) if context is None else context
    whole("context", size, least=2)
    reader = scoring_reader(run, window=size, batch_size=batch_size)
    source = fasta if isinstance(fasta, DocumentSource) else open_fasta(fasta, run.recipe.data)
    numbers = {name: i for i, name in enumerate(source.names)}
    found = tuple(read_vcf(vcf))
    for variant in found:
        # Find what is wrong with the last row before hours are spent on the first ones
        _check_variant(source, numbers, variant, size)
    ratios = []
    for group in batched(found, AT_ONCE):
        windows = [allele_windows(source, numbers[v.chrom], v, size) for v in group]
        ratios.append(_ratios(reader, group, windows))
    forward, reverse = np.concatenate(ratios, 1)
    return VariantScores(found, forward, reverse, (forward + reverse) / 2)


def allele_windows(source: DocumentSource, number: int, variant: Variant, size: int) -> tuple[bytes, bytes]:
    """The windows with the reference allele and with the alternate one, of equal length.

    Args:
      source: the reference.
      number: of the variant's record.
      variant: what is changed where.
      size: bytes of a window that no end of the record cuts short.
    """
    start, before, after = variant.pos - 1, len(variant.ref), len(variant.alt)
    ref = source.read(number, start, start + before)
    alt = variant.alt.lower() if ref[:1].islower() else variant.alt.upper()
    left = min((size - max(before, after)) // 2, start)
    right = int(source.lengths[number]) - (start + before)
    # from the allele on, the alternate window and the reference one have as many bytes
    length = max(min(size - left, right + min(before, after)), before, after)
    head = source.read(number, start - left, start)
    end = start + before
    tail = read_padded(source, number, end, end + length - min(before, after))
    return head + ref + tail[: length - before], head + alt.encode() + tail[: length - after]


def _check_variant(source: DocumentSource, numbers: dict[str, int], variant: Variant, size: int) -> None:
    """Raises ValueError unless both alleles fit into a window, and the reference one is what the FASTA file holds."""
    if variant.chrom not in numbers:
        raise ValueError(
            f"{variant}: the FASTA file has no record {variant.chrom!r}, it has {', '.join(list(numbers)[:8])}: rename "
            "the chromosomes of one file"
        )
    where, longest = f"{variant.chrom}:{variant.pos}", max(len(variant.ref), len(variant.alt))
    if longest > size:
        raise ValueError(
            f"{where} has an allele of {longest} bytes, longer than the windows: raise context = {size}"
        )
    number = numbers[variant.chrom]
    length: int = int(source.lengths[number])
    if variant.pos > length:
        raise ValueError(
            f"{where} lies behind the end of the FASTA record, which has {length} bases: take the reference that the "
            "variants were called against"
        )
    start = variant.pos - 1
    held = source.read(number, start, min(start + len(variant.ref), length))
    if held.upper() != variant.ref.upper().encode():
        raise ValueError(
            f"{where}: the VCF file expects reference allele {variant.ref!r}, the FASTA record of {length} bases holds "
            f"{held.decode('ascii', 'replace')!r}: take the reference that the variants were called against"
        )


def _ratios(reader: Reader, group: Sequence[Variant], windows: Sequence[tuple[bytes, bytes]]) -> np.ndarray:
    """Float64[2, N]: log p(alt) - log p(ref) forward, and of the reverse complements."""
    names = [f"{variant}, {kind} window" for variant in group for kind in ("reference", "alternate")]
    source = BytesSource([window for pair in windows for window in pair], names)
    check_nucleotides(source)
    lengths = source.lengths
    nats = [log_likelihoods(reader, strand, lengths) for strand in (source, ReverseComplement(source))]
    return np.stack([x[1::2] - x[::2] for x in nats])
