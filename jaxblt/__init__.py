"""Models that read raw bytes over very long contexts."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.run import Run

__version__ = "0.1.0"

__all__ = ["__version__", "load"]


def load(run_dir: str | os.PathLike[str], **options: Any) -> "Run":
    """A finished or running run's model, parameters, patcher, threshold and vocabulary; see `jaxblt.run.load`."""
    from jaxblt.run import load as load_run

    return load_run(run_dir, **options)
