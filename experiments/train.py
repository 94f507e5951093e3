"""Trains a recipe: python -m experiments.train RECIPE [--run-dir DIR] [--overrides]."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from experiments._cli import parse_recipe_and, run

ABOUT = (
    "Trains a recipe, from the start or from the newest checkpoint in its run folder. Every field of the recipe is an "
    "option. On several hosts start one process a host (or a GPU); they find each other through SLURM, Open MPI, "
    "Kubernetes, the JAXBLT_* variables or the options below; experiments/launch holds samples."
)


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Several processes as one run; what is None comes from the environment.

    Attributes:
      coordinator: "host:port" of process 0, reachable from all.
      num_processes: of the run.
      process_id: of this one, from 0.
      timeout_s: seconds to wait for the others.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout_s: int = 300


def main(argv: Sequence[str]) -> None:
    """Parses, joins the other processes and trains."""
    recipe, run_dir, launch = parse_recipe_and(argv, LaunchConfig(), script="experiments.train", about=ABOUT)
    from jaxblt.parallel import init_distributed
    from jaxblt.training.loop import fit

    init_distributed(**asdict(launch))
    fit(recipe, run_dir)


if __name__ == "__main__":
    run(main)
