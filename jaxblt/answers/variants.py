"""Effects of variants: how much likelier the alternate allele makes its surroundings than the reference does."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import Reader
from jaxblt.answers.score import BATCH_SIZE, log_likelihoods, scoring_reader
from jaxblt.answers.strands import check_nucleotides
from jaxblt.answers.tables import write_tsv
from jaxblt.answers.vcf import FIRST, Variant, VcfFile, open_vcf, unscored, unscored_kind
from jaxblt.data.letters import letters_of
from jaxblt.data.sources import BytesSource, DocumentSource, FastaSource, ReverseComplement
from jaxblt.data.sources.fasta import read_padded
from jaxblt.data.sources.opening import name_of
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.show import show
from jaxblt.validation import whole

LONGEST_DEFAULT = 8192
"""Bytes of a window at the most where the caller does not say."""

AT_ONCE = 256
"""Variants whose windows are held in memory together."""

LACKING = "contig that the FASTA file lacks"

FIGURES = ("score_forward", "score_reverse", "score")

IUPAC = {
    "R": "AG",
    "Y": "CT",
    "S": "CG",
    "W": "AT",
    "K": "GT",
    "M": "AC",
    "B": "CGT",
    "D": "AGT",
    "H": "ACT",
    "V": "ACG",
}
"""Bases that a code of the reference stands for; VCF has no code but N."""


@dataclass(frozen=True, eq=False)
class VariantScores:
    """A row an alternate allele, in the order of the file.

    Attributes:
      variants: what is changed where.
      score_forward: Float64[N], nats: log p(window with alt) - log p(window with ref).
      score_reverse: Float64[N], the same of the windows' reverse complements.
      score: Float64[N], the mean of both; above 0 the model finds the alternate allele likelier.
      columns: names of what `Variant.rest` holds.
      skipped: how many alleles of each kind have no score and were left out.
    """

    variants: tuple[Variant, ...]
    score_forward: np.ndarray
    score_reverse: np.ndarray
    score: np.ndarray
    columns: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    __repr__ = show

    def __len__(self) -> int:
        return len(self.variants)

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns of `rows`."""
        return (*Variant._fields[:FIRST], *FIGURES, *self.columns)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield a row for each allele: the variant, its scores, and the VCF file's other columns."""
        figures = zip(*(getattr(self, name).tolist() for name in FIGURES), strict=True)
        for variant, numbers in zip(self.variants, figures, strict=True):
            yield *variant[:FIRST], *numbers, *variant.rest

    def to_tsv(self, path: str | os.PathLike[str]) -> None:
        """Write columns chrom, pos, id, ref, alt, the scores, and the VCF file's others.

        The scores are score_forward, score_reverse and score.
        """
        write_tsv(path, self.header, self.rows())


def variants(
    run: TrainedRun,
    vcf: str | os.PathLike[str],
    fasta: str | os.PathLike[str] | DocumentSource,
    *,
    context: int | None = None,
    batch_size: int = BATCH_SIZE,
    skip: bool = False,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> VariantScores:
    """Return log-likelihood ratios log p(alt) - log p(ref) of a VCF file's variants, in nats.

    Both windows begin at the same base and have the same number of bytes, `context`. The longer allele stands in their
    middle; where the alleles differ in length, the window of the shorter one ends further to the right. At the ends of
    a chromosome windows are cut short, both alike. Only where the reference has too few bases to fill a window with the
    alleles in it, N stands for those that are missing.

    A window is scored as a record (see `jaxblt.answers.score`): BOS first, no EOS. The windows' reverse complements are
    scored too.

    Bases of the windows have the case that `open_records` gives to FASTA bases; alternate alleles have the case of the
    reference allele's first base. With `scored` in the run's data only those targets count, as in
    `jaxblt.answers.score`. VCF has no code except N. Where the FASTA file holds another code, and the reference allele
    a base that it stands for, the windows hold that base.

    Args:
      run: trained to predict the next byte.
      vcf: plain or compressed; rows with several alternate alleles are split.
      fasta: the reference, or its records.
      context: bytes of a window; None for the length of the run's training rows, at most 8,192.
      batch_size: windows that are read at once.
      skip: leave out alleles without a score, and count them by kind: `*`, `.`, symbolic ones and breakends, alleles of
        other letters than ACGTN or longer than a window, those equal to REF, and contigs that the FASTA file lacks.
      as_trained: case and scored characters are those of the run's data; False takes every byte as it is.
      mesh: of the devices that read; None for the one in force, or one device.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: the reference allele is not what the FASTA file holds.
      ValueError: an allele has no score, without `skip`, or none has one.
      ValueError: a log-likelihood is not finite.
    """
    options = {"batch_size": batch_size, "skip": skip, "as_trained": as_trained, "mesh": mesh}
    groups = tuple(stream_variants(run, vcf, fasta, context=context, **options))
    arrays = {name: np.concatenate([getattr(group, name) for group in groups]) for name in FIGURES}
    return replace(groups[0], variants=tuple(v for group in groups for v in group.variants), **arrays)


def stream_variants(
    run: TrainedRun,
    vcf: str | os.PathLike[str],
    fasta: str | os.PathLike[str] | DocumentSource,
    *,
    context: int | None = None,
    batch_size: int = BATCH_SIZE,
    skip: bool = False,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Iterator[VariantScores]:
    """Yield the results of `variants` for a few hundred alleles each.

    No file is held in memory. The whole file is checked first. Each part has the counts of skipped alleles of the whole
    file.
    """
    size = min(run.recipe.data.seq_len, LONGEST_DEFAULT) if context is None else context
    whole("context", size, least=2)
    reader = scoring_reader(run, window=size, batch_size=batch_size, as_trained=as_trained, mesh=mesh)
    source = fasta if isinstance(fasta, DocumentSource) else FastaSource(fasta)
    if as_trained:
        source = letters_of(run.recipe.data, of_fasta=True).open(source)
    reference = Reference(source, size)
    file = open_vcf(vcf)
    # Find what is wrong with the last row before hours are spent on the first ones
    skipped = _check_variants(file, reference, skip=skip)
    scored = (variant for _, variant in file.alleles() if reference.unscored_kind(variant) is None)
    for group in batched(scored, AT_ONCE):
        windows = [allele_windows(source, reference.numbers[v.chrom], v, size) for v in group]
        forward, reverse = _ratios(reader, group, windows)
        yield VariantScores(group, forward, reverse, (forward + reverse) / 2, file.columns, skipped)


def allele_windows(source: DocumentSource, number: int, variant: Variant, size: int) -> tuple[bytes, bytes]:
    """Return the windows with the reference allele and with the alternate one, equally long.

    Args:
      source: the reference.
      number: of the variant's record.
      variant: what is changed where.
      size: bytes of a window that no end of the record cuts short.
    """
    start, before, after = variant.pos - 1, len(variant.ref), len(variant.alt)
    held = source.read(number, start, start + before)
    letters = zip(variant.ref, held.decode("latin-1"), strict=True)
    ref = "".join(base.lower() if letter.islower() else base.upper() for base, letter in letters).encode()
    alt = variant.alt.lower() if ref[:1].islower() else variant.alt.upper()
    left = min((size - max(before, after)) // 2, start)
    right = int(source.lengths[number]) - (start + before)
    # Compare from the allele on: there the alternate window and the reference one have as many bytes
    length = max(min(size - left, right + min(before, after)), before, after)
    head = source.read(number, start - left, start)
    end = start + before
    tail = read_padded(source, number, end, end + length - min(before, after))
    return head + ref + tail[: length - before], head + alt.encode() + tail[: length - after]


class Reference:
    """Records that variants are compared with.

    Attributes:
      source: the records.
      size: bytes of a window.
      numbers: of the records, by name.
    """

    def __init__(self, source: DocumentSource, size: int):
        self.source, self.size = source, size
        self.numbers = {name: i for i, name in enumerate(source.names)}

    def unscored_kind(self, variant: Variant) -> str | None:
        """Return the kind of an allele that has no score here, or None."""
        if (kind := unscored_kind(variant)) is not None:
            return kind
        if variant.chrom not in self.numbers:
            return LACKING
        return "allele longer than the windows" if max(map(len, variant[3:FIRST])) > self.size else None

    def names_near(self, chrom: str) -> str:
        """Return what the FASTA file calls its contigs, for an error about `chrom`, which it lacks."""
        near = [x for x in (f"chr{chrom}", chrom.removeprefix("chr")) if x in self.numbers]
        if near:
            return f"; the FASTA file calls {chrom!r} {near[0]!r}: rename the contigs of one file"
        more = ", ..." if len(self.numbers) > 4 else ""
        return f"; the FASTA file has no {chrom!r}, only {', '.join(map(repr, list(self.numbers)[:4]))}{more}"

    def check(self, where: str, variant: Variant) -> None:
        """Raise ValueError unless the FASTA file holds the reference allele.

        A code that stands for its base counts as the base.
        """
        number = self.numbers[variant.chrom]
        length, place = int(self.source.lengths[number]), f"{where}, {variant.chrom}:{variant.pos}"
        if variant.pos > length:
            raise ValueError(
                f"{place} lies behind the end of the FASTA record, which has {length} bases: take the reference that "
                "the variants were called against"
            )
        start = variant.pos - 1
        held = self.source.read(number, start, min(start + len(variant.ref), length)).decode("latin-1")
        if len(held) != len(variant.ref) or not all(map(_stands_for, held.upper(), variant.ref.upper())):
            raise ValueError(
                f"{place}: the VCF file expects reference allele {variant.ref!r}, the FASTA record of {length} bases "
                f"holds {held!r}: take the reference that the variants were called against"
            )


def _stands_for(held: str, base: str) -> bool:
    return held == base or base in IUPAC.get(held, "")


def _check_variants(file: VcfFile, reference: Reference, *, skip: bool) -> Mapping[str, int]:
    """Count alleles of each kind that have no score.

    Without `skip`, raises ValueError for the first one.
    """
    count, skipped, note = 0, Counter(), ""
    for where, variant in file.alleles():
        kind = reference.unscored_kind(variant)
        if kind == LACKING:
            note = note or reference.names_near(variant.chrom)
        if kind is None:
            reference.check(where, variant)
            count += 1
        elif skip:
            skipped[kind] += 1
        else:
            raise ValueError(f"{unscored(where, variant, kind)}{note}")
    if not count:
        raise ValueError(
            f"{name_of(file.path)!r} has no allele to score, only {told_kinds(skipped)}: check both files{note}"
        )
    return dict(skipped.most_common())


def told_kinds(skipped: Mapping[str, int]) -> str:
    """Return the kinds of skipped alleles and their numbers in a few words."""
    return ", ".join(f"{count:,} {kind}" for kind, count in skipped.items())


def _ratios(reader: Reader, group: Sequence[Variant], windows: Sequence[tuple[bytes, bytes]]) -> np.ndarray:
    """Return log p(alt) - log p(ref), Float64[2, N]: forward, and of the reverse complements."""
    names = [f"{variant}, {kind} window" for variant in group for kind in ("reference", "alternate")]
    source = BytesSource([window for pair in windows for window in pair], names)
    check_nucleotides(source)
    lengths = source.lengths
    nats = [log_likelihoods(reader, strand, lengths)[0] for strand in (source, ReverseComplement(source))]
    return np.stack([x[1::2] - x[::2] for x in nats])
