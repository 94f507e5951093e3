"""Segments a file into patches: python -m experiments.patch FILE --run-dir RUN_DIR, or --mode space."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import tyro

from experiments._cli import parse, run
from jaxblt.patching.config import Mode


def patch(
    file: Annotated[str, tyro.conf.Positional],
    run_dir: str | None = None,
    mode: Mode | None = None,
    threshold: float | None = None,
    patch_size: int | None = None,
    max_length: int | None = None,
    recalibrate: bool = False,
    start: int = 0,
    length: int | None = None,
    show: int = 2000,
    plot: str | None = None,
    plot_bytes: int = 640,
    entropies_out: str | None = None,
) -> None:
    """Prints a file's patches and their statistics; on request draws them, and writes the entropies for training.

    Args:
      file: text or FASTA, may end in .gz or .xz.
      run_dir: a run with an entropy model, or an entropy model's run; needed by the modes that read entropies.
      mode: of the patcher; the run's by default.
      threshold: in nats; the run's by default.
      patch_size: bytes of a static patch.
      max_length: bytes of the longest patch.
      recalibrate: slots for whatever this file asks for, in place of the run's capacity.
      start: first byte to segment.
      length: bytes to segment; all by default.
      show: bytes to print, with │ between patches.
      plot: PNG file for a picture of entropies and boundaries.
      plot_bytes: bytes in the picture.
      entropies_out: .npy file for the entropies of the whole file, which a recipe reads as data.entropies.
    """
    from experiments import _patching
    from jaxblt.training.report import patcher_line

    loaded = None if run_dir is None else _patching.load_entropy_model(run_dir)
    config = _patching.patcher_of(loaded, mode)
    changes = {"threshold": threshold, "patch_size": patch_size, "max_length": max_length}
    config = replace(config, **{name: value for name, value in changes.items() if value is not None})
    if threshold is not None or recalibrate:
        config = replace(config, margin=None)
    if recalibrate:
        config = replace(config, capacity=None)
    source = _patching.open_file(file)
    ids = _patching.read_ids(source, start, length)
    entropies = None if loaded is None else loaded.entropies(ids)
    patches = _patching.segment(config, ids, entropies)
    print(_patching.report(ids, patches, entropies, show))
    print(f"patcher: {patcher_line(config)}")
    _patching.warn_of_refusals(config, patches)
    if plot is not None:
        if entropies is None:
            raise ValueError("--plot draws entropies: name a run with --run-dir")
        _patching.draw(plot, ids[:plot_bytes], entropies[:plot_bytes], config)
    if entropies_out is not None:
        if loaded is None:
            raise ValueError("--entropies-out needs an entropy model: name a run with --run-dir")
        _patching.write_all(entropies_out, source, loaded)
        print(f"wrote {entropies_out}: {np.load(entropies_out, mmap_mode='r').shape[0]} entropies")


def main(argv: Sequence[str]) -> None:
    """Parses and segments."""
    parse(patch, argv, script="experiments.patch")


if __name__ == "__main__":
    run(main)
