"""Draws what a run's layers do under a passage: jaxblt memory RUN_DIR FILE --out pictures/memory."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxblt.outputs import check_output
from jaxblt.training.state import Step
from jaxblt.training.stored.resolved import run_files
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jaxblt.training.log.runlog import RunLog


def memory(
    run_dir: Annotated[str, tyro.conf.Positional],
    file: Annotated[str, tyro.conf.Positional],
    out: str = "memory",
    show: Literal["memory", "routing", "attention"] = "memory",
    record: str | None = None,
    start: int = 0,
    length: int = 400,
    tensorboard: bool = False,
    step: Step | None = None,
    as_trained: bool = True,
    overwrite: bool = False,
) -> None:
    """Draw surprise, length and forgetting of neural memories under a passage.

    Of slots it draws usage, age and reads. `--show routing` draws where each byte writes and reads in state engines,
    and `--show attention` the weight of each key, by head. The passage is read as the beginning of a document. The
    picture and its values go to OUT.png and OUT.json.

    Args:
      run_dir: a run of a byte language model with a memory, or with the layers to show.
      file: text or FASTA, may end in .gz or .xz.
      out: path of both files without their endings.
      show: what is drawn.
      record: name of the FASTA record, where there are several.
      start: first byte of the passage.
      length: bytes of it, at most.
      tensorboard: show the picture in the run's TensorBoard too, at the run's step.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.
      as_trained: the passage has the case of the run's data; without it every byte is taken as it is.
      overwrite: replace OUT.png and OUT.json if they are there.

    Raises:
      ValueError: an option is out of range, a record has to be named, or the run has no such layer.
    """
    import jaxblt
    from jaxblt.cli import patching
    from jaxblt.profiling.memory_picture import plot_memory

    whole("--start", start, least=0)
    whole("--length", length, least=1)
    for path in (f"{out}.png", f"{out}.json"):
        check_output("--out", path, inputs=(file, *run_files(run_dir)), overwrite=overwrite)
    run = jaxblt.load(run_dir, step=step)
    source = patching.open_file(file, run.recipe.data if as_trained else None)
    document, *others = patching.chosen(source, record)
    if others:
        raise ValueError(
            f"a passage is of one record, and {file} has {1 + len(others)}: name it with --record"
        )
    left = int(source.lengths[document]) - start
    ids = patching.read_ids(source, document, start, min(length, left) if left > 0 else None)
    with _tensorboard(run_dir) if tensorboard else nullcontext() as log:
        picture = plot_memory(run, ids, what=show, out=out, log=log)
    layers = len(picture.values["layers"])
    print(f"wrote {out}.png and {out}.json: layers: {layers}, ids: {len(ids)}")


def _tensorboard(run_dir: str) -> "RunLog":
    """Return a log that writes to the run's TensorBoard only."""
    from jaxblt.training.log.runlog import RunLog
    from jaxblt.training.log.trackers import TensorBoardTracker

    return RunLog(run_dir, trackers=lambda folder: (TensorBoardTracker(folder),))
