"""Runs as files of other formats, and models of other libraries as runs.

- `write_run`, `read_run`: parameters and recipe as one safetensors file, and back to a run folder.

Checkpoints of a run that trains are in `jaxblt.training.checkpoint`. Nothing here trains or answers.
"""

from jaxblt.interchange.runs import read_run, write_run

__all__ = ["read_run", "write_run"]
