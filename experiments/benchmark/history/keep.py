"""Kept baselines: python -m experiments.benchmark keep FILE --folder DIR."""

from typing import Annotated

import tyro

from jaxblt.profiling import history


def keep(files: Annotated[tuple[str, ...], tyro.conf.Positional], folder: str = "runs/baselines") -> None:
    """Keep records as baselines, by machine and benchmark.

    Args:
      files: records that benchmarks wrote.
      folder: of all kept records.

    Raises:
      FileExistsError: a record is kept already.
      ValueError: a file is no record.
    """
    for file in files:
        print(history.keep(file, folder))
