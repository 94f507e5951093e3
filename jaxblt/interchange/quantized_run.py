"""A quantised run as a folder that `jaxblt.load` opens."""

import os
from typing import TYPE_CHECKING

from jaxblt.interchange.runs import alone, write_run_folder
from jaxblt.precision.weights import to_stored

if TYPE_CHECKING:
    from jaxblt.run import Run


def write_quantized(run: "Run", run_dir: str | os.PathLike[str]) -> None:
    """Write a run as a folder, whole or not at all; its checkpoint holds kernels as they are stored.

    The folder is checked as any run's is: files by size and sum, arrays by sums of their bits, frozen trees by hash.
    It has no optimiser. Weights that are not quantised are fp32, as they are in the run.

    Raises:
      FileExistsError: the folder holds something.
    """
    recipe = alone(run.recipe)
    write_run_folder(run_dir, recipe, to_stored(run.params), dict(run.frozen), step=run.step)
