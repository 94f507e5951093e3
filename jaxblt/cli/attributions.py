"""`jaxblt attributions`: which bytes a run's answers rest on, as a table, a track, motifs and a picture."""

from pathlib import Path

from jaxblt.answers.attributions import Method
from jaxblt.cli.reading import Reading, ReadingOptions
from jaxblt.cli.reports import check_reports, open_sequences, save_picture
from jaxblt.training.stored.resolved import run_files


def attributions(
    run_dir: Path,
    file: Path,
    /,
    *,
    out: Path,
    regions: Path | None = None,
    feature: str | None = None,
    track: Path | None = None,
    motifs: Path | None = None,
    motif_width: int = 10,
    both_strands: bool = False,
    picture: Path | None = None,
    method: Method = "gradient",
    steps: int = 32,
    label: str | None = None,
    overwrite: bool = False,
    reading: Reading = ReadingOptions(),
) -> str:
    """Write what each byte adds to its record's answer, as tab-separated values.

    Args:
      run_dir: folder of a run that predicts the next byte, or was fine-tuned on one class or number of each record.
      file: FASTA (by its ending), JSON lines (.jsonl) or text, which is one record.
      out: file to write, with columns name, position, byte and attribution.
      regions: BED, GFF or GTF file of regions of FILE that are read as records.
      feature: of GFF and GTF, the lines that count, such as "gene".
      track: file to write the attributions into for a genome browser, .bedgraph or .bw.
      motifs: file to write the motifs of windows with high attributions into, in MEME format.
      motif_width: letters of a motif of DNA.
      both_strands: sites of motifs lie on either strand.
      picture: file to draw the first record into, .png, .svg or .pdf.
      method: gradient times input ("gradient"), or integrated gradients ("integrated").
      steps: of an integral.
      label: of a run on classes, the class that is explained; by default what the run calls each record.
      overwrite: replace files that are there.
      reading: which parameters answer, and how records are read.

    Returns:
      A line that says what was written.
    """
    from jaxblt.answers.reports.motifs import find_motifs, write_meme
    from jaxblt.answers.reports.tracks import write_track

    written = {"--out": out, "--track": track, "--motifs": motifs, "--picture": picture}
    check_reports(written, inputs=(file, regions, *run_files(run_dir)), overwrite=overwrite)
    source = open_sequences(file, regions, feature, as_genome=track is not None)
    options = {"steps": steps, **reading.options()}
    run = reading.load(run_dir)
    found = run.attributions(source, method=method, label=label, **options)
    found.to_tsv(out)
    told = [str(out)]
    if track is not None:
        write_track(track, source, found.values)
        told.append(str(track))
    if picture is not None:
        from jaxblt.answers.reports.pictures import plot_attributions

        save_picture(plot_attributions(found), picture)
        told.append(str(picture))
    # Seek motifs last: where there is none, the other files are written all the same
    if motifs is not None:
        held = find_motifs(found.sequences, found.values, width=motif_width, both_strands=both_strands)
        write_meme(motifs, held)
        told.append(f"{motifs} ({', '.join(m.consensus for m in held)})")
    return f"{len(found)} records, {sum(map(len, found.sequences)):,} bytes, in {', '.join(told)}"
