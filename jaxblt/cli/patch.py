"""Segments a file into patches: jaxblt patch FILE --run-dir RUN_DIR, or --mode space."""

from dataclasses import fields, make_dataclass, replace
from typing import Annotated, Any, get_type_hints

import numpy as np
import tyro

from jaxblt.patching.config import PatcherConfig
from jaxblt.training.state import Step
from jaxblt.training.stored.resolved import run_files
from jaxblt.validation import whole

_HINTS = get_type_hints(PatcherConfig)
PatcherOptions = make_dataclass(
    "PatcherOptions", [(f.name, _HINTS[f.name] | None, None) for f in fields(PatcherConfig)], frozen=True
)
"""All fields of a patcher as options: None for those that are not given."""
PatcherOptions.__doc__ = PatcherConfig.__doc__


def patch(
    file: Annotated[str, tyro.conf.Positional],
    run_dir: str | None = None,
    own: Annotated[Any, tyro.conf.arg(name="")] = PatcherOptions(),
    record: str | None = None,
    recalibrate: bool = False,
    start: int = 0,
    length: int | None = None,
    show: int = 2000,
    plot: str | None = None,
    plot_bytes: int = 640,
    entropies_out: str | None = None,
    step: Step | None = None,
    as_trained: bool = True,
    overwrite: bool = False,
) -> None:
    """Print a file's patches and statistics; draw them, and write the entropies, on request.

    Every record of a FASTA file is patched apart. A part of one is patched, or drawn, with --record.

    Args:
      file: text or FASTA, may end in .gz or .xz.
      run_dir: a run with an entropy model or a router, or an entropy model's run; needed by the modes that read
        entropies. A router reads a document in one pass: cut long ones by --length.
      own: fields of the patcher; the run's by default.
      record: name of the one FASTA record to segment; all by default.
      recalibrate: slots for whatever this file asks for, in place of the run's capacity.
      start: first byte to segment.
      length: bytes to segment; all by default.
      show: bytes to print, with │ between patches.
      plot: PNG file for a picture of entropies and boundaries.
      plot_bytes: bytes in the picture.
      entropies_out: .npy file for the entropies of the whole file, which a recipe reads as data.entropies.
      step: of the run's checkpoint, or "best" for that of the best evaluation; by default the newest.
      as_trained: letters have the case of the run's data; without it every byte is taken as it is.
      overwrite: replace files that are there.

    Raises:
      ValueError: an option is out of range, no record has the name, or one of several records has to be named.
    """
    from jaxblt.cli import patching
    from jaxblt.training.log.report import patcher_line

    inputs = (file, *(() if run_dir is None else run_files(run_dir)))
    patching.check_outputs(plot, entropies_out, inputs=inputs, overwrite=overwrite)
    whole("--start", start, least=0)
    whole("--show", show, least=0)
    whole("--plot-bytes", plot_bytes, least=1)
    if length is not None:
        whole("--length", length, least=1)
    loaded = None if run_dir is None else patching.load_patching_model(run_dir, step)
    routed = isinstance(loaded, patching.RoutedModel)
    changes = {name: value for name, value in vars(own).items() if value is not None}
    config = patching.patcher_of(loaded, changes)
    if recalibrate:
        config = replace(config, margin=None, capacity=None)
    patching.check_model(loaded, plot=plot, entropies_out=entropies_out)
    if loaded is not None and "entropy_context" in changes:
        loaded = patching.with_context(loaded, config.entropy_context)
    source = patching.open_file(file, loaded.data if loaded is not None and as_trained else None)
    records = patching.chosen(source, record)
    if len(records) > 1 and (start or length is not None or plot is not None):
        names = ", ".join(source.names[i] for i in records[:8])
        said = f"--start, --length and --plot are of one record, and {file} has {len(records)}"
        raise ValueError(f"{said}: name it with --record ({names})")
    for i in records:
        ids = patching.read_ids(source, i, start, length)
        entropies = None if loaded is None else loaded.entropies(ids)
        patches = patching.segment(config, ids, entropies)
        if len(records) > 1:
            print(f"record {source.names[i]}")
        print(patching.report(ids, patches, entropies, show, routed=routed))
        patching.warn_of_refusals(config, patches)
        if plot is not None and entropies is not None:
            patching.draw(plot, ids[:plot_bytes], entropies[:plot_bytes], config, routed=routed)
    print(f"patcher: {patcher_line(config)}")
    if entropies_out is not None and isinstance(loaded, patching.EntropyModel):
        patching.write_all(entropies_out, source, loaded)
        print(f"wrote {entropies_out}: {np.load(entropies_out, mmap_mode='r').shape[0]} entropies")
