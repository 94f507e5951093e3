"""Answers as commands: from a run's folder and a file to a file of answers. Each returns the line to print."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxblt.adapters.retrieval.index import FILE, save_index
from jaxblt.answers.embed import Pool
from jaxblt.answers.index import CHUNKS, build_index
from jaxblt.answers.score import BATCH_SIZE, Scores
from jaxblt.answers.tables import write_tsv
from jaxblt.answers.variants import stream_variants, told_kinds
from jaxblt.cli.mesh import asked_mesh
from jaxblt.cli.reading import Reading, ReadingOptions
from jaxblt.cli.reports import check_reports, open_sequences, save_picture
from jaxblt.data.splits import SplitName
from jaxblt.outputs import check_output
from jaxblt.precision.weights import Scheme
from jaxblt.training.state import Step
from jaxblt.training.stored.resolved import run_files


def score(
    run_dir: Path,
    file: Path,
    /,
    *,
    out: Path,
    regions: Path | None = None,
    feature: str | None = None,
    track: Path | None = None,
    per_byte: bool = False,
    both_strands: bool = False,
    window: int | None = None,
    overwrite: bool = False,
    quantize: Scheme | None = None,
    reading: Reading = ReadingOptions(),
) -> str:
    """Write the log-likelihood of each record of a file, in nats, as tab-separated values.

    Args:
      run_dir: folder of a run that predicts the next byte.
      file: FASTA (by its ending), JSON lines (.jsonl) or text, which is one record.
      out: file to write, with columns name, length, scored, log_likelihood, bits_per_byte.
      regions: BED, GFF or GTF file of regions of FILE that are read as records.
      feature: of GFF and GTF, the lines that count, such as "gene".
      track: file to write the nats of every base into for a genome browser, .bedgraph or .bw.
      per_byte: add a column with the nats of every byte, commas between them.
      both_strands: mean over the record and its reverse complement.
      window: most positions of a row; by default the length of the run's training rows.
      overwrite: replace OUT if it is there.
      quantize: read kernels of products in fewer bits: int8, int4, fp8, or w8a8 with activations of 8 bits too.
      reading: which parameters answer, and how records are read.

    Returns:
      A line that says what was written.
    """
    from jaxblt.answers.reports.tracks import write_track
    from jaxblt.cli.quantize import load_quantized

    written = {"--out": out, "--track": track}
    check_reports(written, inputs=(file, regions, *run_files(run_dir)), overwrite=overwrite)
    source = open_sequences(file, regions, feature, as_genome=track is not None)
    options = {"window": window, **reading.options()}
    found = load_quantized(run_dir, quantize, step=reading.step, weights=reading.weights).score(
        source, per_byte=per_byte or track is not None, both_strands=both_strands, **options
    )
    if track is not None:
        assert found.per_byte is not None
        # Leave out the nats of EOS, which is no base
        bases = zip(found.per_byte, found.lengths.tolist(), strict=True)
        write_track(track, source, [nats[:length] for nats, length in bases])
    replace(found, per_byte=found.per_byte if per_byte else None).to_tsv(out)
    also = "" if track is None else f" and {track}"
    return f"{len(found)} records, {found.lengths.sum():,} bytes, {_told_bits(found)}, in {out}{also}"


def _told_bits(found: Scores) -> str:
    """Return the mean over all scored bytes, and how many records have none, such as soft-masked ones."""
    bare = int((found.scored == 0).sum())
    none = (
        f"{bare} record{'s' * (bare > 1)} without a byte that is scored (--no-as-trained scores every byte)"
    )
    bits = -found.log_likelihood.sum() / found.scored.sum() / np.log(2)
    return f"{bits:.4f} bits per byte{f', {none}' if bare else ''}"


def embed(
    run_dir: Path,
    file: Path,
    /,
    *,
    out: Path,
    regions: Path | None = None,
    feature: str | None = None,
    layer: int | Literal["final"] | None = None,
    pool: Pool = "mean",
    window: int | None = None,
    overwrite: bool = False,
    reading: Reading = ReadingOptions(),
) -> str:
    """Write hidden states of each record of a file as a NumPy archive (.npz).

    Args:
      run_dir: folder of a run.
      file: FASTA (by its ending), JSON lines (.jsonl) or text, which is one record.
      out: file to write, with arrays names, lengths and states.
      regions: BED, GFF or GTF file of regions of FILE that are read as records.
      feature: of GFF and GTF, the lines that count, such as "gene".
      layer: number of a block, negative from the end, or "final".
      pool: "mean", "last", "per_byte" or "per_patch".
      window: most positions of a row; by default the length of the run's training rows.
      overwrite: replace OUT if it is there.
      reading: which parameters answer, and how records are read.

    Returns:
      A line that says what was written.
    """
    check_reports({"--out": out}, inputs=(file, regions, *run_files(run_dir)), overwrite=overwrite)
    source = open_sequences(file, regions, feature)
    options = {"window": window, **reading.options()}
    found = reading.load(run_dir).embed(source, layer=layer, pool=pool, **options)
    found.to_npz(out)
    states = sum(array.size // array.shape[-1] for array in found.arrays)
    width = found.arrays[0].shape[-1]
    return f"{len(found)} records, {states:,} states of width {width} from layer {found.layer}, in {out}"


def classify(
    run_dir: Path,
    file: Path,
    /,
    *,
    out: Path,
    overwrite: bool = False,
    reading: Reading = ReadingOptions(),
) -> str:
    """Write each record's label and the probabilities of all classes, as tab-separated values.

    Args:
      run_dir: folder of a run that was fine-tuned on labels.
      file: FASTA (by its ending), JSON lines (.jsonl) or text, which is one record.
      out: file to write, with columns name, one a class, and prediction.
      overwrite: replace OUT if it is there.
      reading: which parameters answer, and how records are read.

    Returns:
      A line that says what was written.
    """
    check_output("--out", out, inputs=(file, *run_files(run_dir)), overwrite=overwrite)
    found = reading.load(run_dir).classify(file, **reading.options())
    found.to_tsv(out)
    return f"{len(found)} records, {found.summary()}, in {out}"


def variants(
    run_dir: Path,
    vcf: Path,
    fasta: Path,
    /,
    *,
    out: Path,
    context: int | None = None,
    skip: bool = False,
    overwrite: bool = False,
    reading: Reading = ReadingOptions(),
) -> str:
    """Write log p(alt) - log p(ref) in nats of a VCF file's variants, as tab-separated values.

    Args:
      run_dir: folder of a run that predicts the next byte.
      vcf: variants, plain or compressed.
      fasta: the reference that they were called against.
      out: file to write, with columns chrom, pos, id, ref, alt, score_forward, score_reverse, score, and the file's
        others: qual, filter, info, format and samples.
      context: bytes of a window; by default the length of the run's training rows, at most 8,192.
      skip: leave out and count alleles that have no score (`*`, `.`, symbolic ones, breakends, contigs that the
        reference lacks). Otherwise the first one is an error.
      overwrite: replace OUT if it is there.
      reading: which parameters answer, and how records are read.

    Returns:
      A line that says what was written.
    """
    check_output("--out", out, inputs=(vcf, fasta, *run_files(run_dir)), overwrite=overwrite)
    options = {"skip": skip, **reading.options()}
    run = reading.load(run_dir)
    groups = stream_variants(run, vcf, fasta, context=context, **options)
    first = next(groups)
    count = above = 0

    def rows() -> Iterator[tuple[Any, ...]]:
        nonlocal count, above
        for group in itertools.chain([first], groups):
            count, above = count + len(group), above + int((group.score > 0).sum())
            yield from group.rows()

    write_tsv(out, first.header, rows())
    skipped = f", {told_kinds(first.skipped)} skipped" if first.skipped else ""
    return f"{count} variants, {above} likelier than the reference{skipped}, in {out}"


def mutagenesis(
    run_dir: Path,
    file: Path,
    /,
    *,
    out: Path,
    regions: Path | None = None,
    feature: str | None = None,
    picture: Path | None = None,
    alphabet: str = "ACGT",
    label: str | None = None,
    window: int | None = None,
    overwrite: bool = False,
    reading: Reading = ReadingOptions(),
) -> str:
    """Write the effect of every single substitution of each record of a file, as tab-separated values.

    Args:
      run_dir: folder of a run that predicts the next byte, or was fine-tuned on one class or number of each record.
      file: FASTA (by its ending), JSON lines (.jsonl) or text, which is one record.
      out: file to write, with columns name, label (of runs on classes), position, reference, and one a letter.
      regions: BED, GFF or GTF file of regions of FILE that are read as records.
      feature: of GFF and GTF, the lines that count, such as "gene".
      picture: file to draw the first record's effects into, .png, .svg or .pdf.
      alphabet: letters that stand in for others, such as ACDEFGHIKLMNPQRSTVWY.
      label: of a run on classes, the class whose log-odds are compared; by default what the run calls each record.
      window: of a run that predicts bytes, most positions of a row; by default the length of its training rows.
      overwrite: replace OUT if it is there.
      reading: which parameters answer, and how records are read.

    Returns:
      A line that says what was written.
    """
    written = {"--out": out, "--picture": picture}
    check_reports(written, inputs=(file, regions, *run_files(run_dir)), overwrite=overwrite)
    source = open_sequences(file, regions, feature)
    options = {"window": window, **reading.options()}
    run = reading.load(run_dir)
    found = run.mutagenesis(source, alphabet=alphabet, label=label, **options)
    found.to_tsv(out)
    if picture is not None:
        from jaxblt.answers.reports.pictures import plot_mutagenesis

        save_picture(plot_mutagenesis(found), picture)
    also = "" if picture is None else f" and {picture}"
    places = sum(map(len, found.sequences))
    return f"{len(found)} records, {places:,} positions x {len(alphabet)} letters, in {out}{also}"


def index(
    run_dir: Path,
    /,
    *,
    out: Path,
    chunk: int = 64,
    neighbours: int = 8,
    stack: str | None = None,
    split: SplitName = "train",
    most: int = CHUNKS,
    batch_size: int = BATCH_SIZE,
    mesh: str | None = None,
    overwrite: bool = False,
    step: Step | None = None,
    trust_sources: bool = False,
) -> str:
    """Write base vectors of the chunks of a run's documents, which a router can search.

    The router is trained over this run as its base.

    Args:
      run_dir: folder of a run without adapters.
      out: folder to write index.safetensors into, where there is none.
      chunk: steps of a chunk, as of the router.
      neighbours: chunks that the router looks at.
      stack: name of the router's stack; by default the model's first.
      split: of the run's data.
      most: chunks that are kept, at about equal distances.
      batch_size: rows that are read at once.
      mesh: sizes of the mesh axes, such as "seq=4,data=2"; the devices left share the rows; one device by default.
      overwrite: replace an index that is there.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest, as a base is.
      trust_sources: fetch URLs that the run's config names; a run of a stranger may name any.

    Returns:
      A line that says what was written.
    """
    from jaxblt.run import load

    check_output("--out", out / FILE, inputs=run_files(run_dir), overwrite=overwrite)
    run = load(run_dir, step=step, weights="raw")
    options = {"chunk": chunk, "neighbours": neighbours, "stack": stack, "batch_size": batch_size}
    found = build_index(
        run, **options, split=split, most=most, mesh=asked_mesh(mesh), trust_sources=trust_sources
    )
    path = save_index(found, out, overwrite=overwrite)
    documents = len(set(found.owners.tolist()))
    return (
        f"{len(found):,} chunks of {found.chunk} steps of {documents:,} documents, width {found.vectors.shape[1]}, "
        f"base {found.base[:12]}, in {path}"
    )
