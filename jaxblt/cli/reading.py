"""Options that commands of answers share: which parameters of a run answer, and how records are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxblt.answers.score import BATCH_SIZE
from jaxblt.cli.mesh import asked_mesh
from jaxblt.training.state import Step, Weights

if TYPE_CHECKING:
    from jaxblt.run import Run


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How a run reads.

    Attributes:
      batch_size: rows, windows or mutants that are read at once.
      as_trained: case and scored characters are those of the run's data; without it every byte is taken as it is.
      mesh: sizes of the mesh axes, such as "seq=4,data=2"; the devices left share the rows; one device by default.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
    """

    batch_size: int = BATCH_SIZE
    as_trained: bool = True
    mesh: str | None = None
    step: Step | None = None
    weights: Weights | None = None

    def load(self, run_dir: Path) -> "Run":
        """Return the run of a folder."""
        from jaxblt.run import load

        return load(run_dir, step=self.step, weights=self.weights)

    def options(self) -> dict[str, Any]:
        """Return options of the run's methods."""
        mesh = asked_mesh(self.mesh)
        return {"batch_size": self.batch_size, "as_trained": self.as_trained, "mesh": mesh}


Reading = Annotated[ReadingOptions, tyro.conf.OmitArgPrefixes]
"""The options on a command line, without a prefix."""
