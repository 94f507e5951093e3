"""Segments a file into patches: jaxblt patch FILE --run-dir RUN_DIR, or --mode space."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import tyro

from jaxblt.cli.parsing import parse
from jaxblt.patching.config import Mode
from jaxblt.validation import whole


def patch(
    file: Annotated[str, tyro.conf.Positional],
    run_dir: str | None = None,
    mode: Mode | None = None,
    threshold: float | None = None,
    patch_size: int | None = None,
    max_length: int | None = None,
    record: str | None = None,
    recalibrate: bool = False,
    start: int = 0,
    length: int | None = None,
    show: int = 2000,
    plot: str | None = None,
    plot_bytes: int = 640,
    entropies_out: str | None = None,
) -> None:
    """Prints a file's patches and their statistics; on request draws them, and writes the entropies for training.

    Every record of a FASTA file is patched apart. A part of one is patched, or drawn, with --record.

    Args:
      file: text or FASTA, may end in .gz or .xz.
      run_dir: a run with an entropy model, or an entropy model's run; needed by the modes that read entropies.
      mode: of the patcher; the run's by default.
      threshold: in nats; the run's by default.
      patch_size: bytes of a static patch.
      max_length: bytes of the longest patch.
      record: name of the one FASTA record to segment; all by default.
      recalibrate: slots for whatever this file asks for, in place of the run's capacity.
      start: first byte to segment.
      length: bytes to segment; all by default.
      show: bytes to print, with │ between patches.
      plot: PNG file for a picture of entropies and boundaries.
      plot_bytes: bytes in the picture.
      entropies_out: .npy file for the entropies of the whole file, which a recipe reads as data.entropies.

    Raises:
      ValueError: an option is out of range, no record has the name, or one of several records has to be named.
    """
    from jaxblt.cli import patching
    from jaxblt.training.report import patcher_line

    patching.check_outputs(plot, entropies_out)
    whole("--start", start, least=0)
    whole("--show", show, least=0)
    whole("--plot-bytes", plot_bytes, least=1)
    if length is not None:
        whole("--length", length, least=1)
    loaded = None if run_dir is None else patching.load_entropy_model(run_dir)
    config = patching.patcher_of(loaded, mode)
    changes = {"threshold": threshold, "patch_size": patch_size, "max_length": max_length}
    config = replace(config, **{name: value for name, value in changes.items() if value is not None})
    if threshold is not None or recalibrate:
        config = replace(config, margin=None)
    if recalibrate:
        config = replace(config, capacity=None)
    if loaded is None and (plot is not None or entropies_out is not None):
        raise ValueError("--plot and --entropies-out need an entropy model: name a run with --run-dir")
    source = patching.open_file(file)
    records = patching.chosen(source, record)
    if len(records) > 1 and (start or length is not None or plot is not None):
        names = ", ".join(source.names[i] for i in records[:8])
        raise ValueError(
            f"--start, --length and --plot are of one record, and {file} has {len(records)}: name it with --record "
            f"({names})"
        )
    for i in records:
        ids = patching.read_ids(source, i, start, length)
        entropies = None if loaded is None else loaded.entropies(ids)
        patches = patching.segment(config, ids, entropies)
        if len(records) > 1:
            print(f"record {source.names[i]}")
        print(patching.report(ids, patches, entropies, show))
        patching.warn_of_refusals(config, patches)
        if plot is not None and entropies is not None:
            patching.draw(plot, ids[:plot_bytes], entropies[:plot_bytes], config)
    print(f"patcher: {patcher_line(config)}")
    if entropies_out is not None and loaded is not None:
        patching.write_all(entropies_out, source, loaded)
        print(f"wrote {entropies_out}: {np.load(entropies_out, mmap_mode='r').shape[0]} entropies")


def main(argv: Sequence[str]) -> None:
    """Parses and segments."""
    parse(patch, argv, prog="jaxblt patch")
