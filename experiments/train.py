"""Trains a recipe: python -m experiments.train RECIPE [--run-dir DIR] [--overrides]."""

from collections.abc import Sequence

from experiments._cli import parse_recipe, run

ABOUT = (
    "Trains a recipe, from the start or from the newest checkpoint in its run folder. Every field of the recipe is an "
    "option. On several hosts start one process a host (or a GPU); they find each other through SLURM, Open MPI, "
    "Kubernetes or the JAXBLT_* variables."
)


def main(argv: Sequence[str]) -> None:
    """Parses, joins the other processes and trains."""
    recipe, run_dir = parse_recipe(argv, script="experiments.train", about=ABOUT)
    from jaxblt.parallel import init_distributed
    from jaxblt.training.loop import fit

    init_distributed()
    fit(recipe, run_dir)


if __name__ == "__main__":
    run(main)
