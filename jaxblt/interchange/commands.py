"""Export and import as commands; each returns the line to print."""

from pathlib import Path

from jaxblt.interchange.runs import Dtype, read_run, write_run
from jaxblt.validation import whole


def export(run_dir: Path, /, *, out: Path, step: int | None = None, dtype: Dtype = "float32") -> str:
    """Write a run to one file for other programs: parameters and recipe as safetensors.

    Entries are named by their paths, such as model.embedding.bytes; frozen trees, such as the entropy model, begin with
    frozen.NAME. The recipe and the step are in the file's metadata. There is no optimiser.

    Args:
      run_dir: folder of the run.
      out: file to write; a file that exists is never overwritten.
      step: of the checkpoint; by default the newest.
      dtype: of the model's parameters in the file; bfloat16 rounds them.

    Returns:
      A line that says what was written.
    """
    from jaxblt.interchange.tensors import check_new
    from jaxblt.run import load

    if step is not None:
        whole("--step", step, least=0)
    check_new(out)
    run = load(run_dir, step=step)
    found = write_run(run, out, dtype=dtype)
    return f"wrote {out}: {found.arrays} arrays of step {run.step}, {found.size:,} bytes"


def import_run(source: Path, /, *, out: Path) -> str:
    """Make a run folder of a file that jaxblt export wrote.

    Everything is checked before anything is written. The folder holds no optimiser: train from it with --init-from.

    Args:
      source: safetensors file.
      out: run folder to make; a folder that holds anything is never touched.

    Returns:
      A line that says what was written.
    """
    found = read_run(source, out)
    return f"wrote {out}: {found.arrays} arrays of {source}; jaxblt.load({str(out)!r}) opens it"
