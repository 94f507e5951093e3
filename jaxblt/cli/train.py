"""Trains a recipe: jaxblt train RECIPE [--run-dir DIR] [--overrides]."""

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from jaxblt.cli.catalogue import fetch_hint
from jaxblt.cli.recipe_options import parse_recipe_and
from jaxblt.training.recipe import Recipe

if TYPE_CHECKING:
    from jaxblt.training.trainer import Fitted

ABOUT = (
    "Trains a recipe, from the start or from the newest checkpoint in its run folder. Every field of the recipe is an "
    "option. On several hosts start one process a host (or a GPU); they find each other through SLURM, Open MPI, "
    "Kubernetes, the JAXBLT_* variables or the options below; experiments/launch holds samples."
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of resuming, and of several processes as one run; None of the latter come from the environment.

    Attributes:
      resume_with: go on with the run in the folder although settings differ that decide what is learned.
      coordinator: "host:port" of process 0, reachable from all.
      num_processes: of the run.
      process_id: of this one, from 0.
      timeout_s: seconds to wait for the others.
    """

    resume_with: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout_s: int = 300


def main(argv: Sequence[str]) -> None:
    """Parse, join the other processes and train."""
    run_recipe(*parse_recipe_and(argv, TrainOptions(), prog="jaxblt train", about=ABOUT))


def run_recipe(recipe: Recipe, run_dir: str, options: TrainOptions) -> "Fitted":
    """Join the other processes and train, or go on; return the run as it ended."""
    from jaxblt.parallel import init_distributed
    from jaxblt.training.loop import fit

    launch = asdict(options)
    resume_with = launch.pop("resume_with")
    init_distributed(**launch)
    try:
        fitted = fit(recipe, run_dir, resume_with=resume_with)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{fetch_hint(recipe)}") from error
    if not fitted.finished:
        # Ignore signals from here on, as all is saved: another one must not make the end look like a failure.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return fitted
