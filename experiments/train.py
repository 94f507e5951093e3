"""Trains a recipe: python -m experiments.train RECIPE [--run-dir DIR] [--overrides]."""

from jaxblt.cli.parsing import run
from jaxblt.cli.train import main

if __name__ == "__main__":
    run(main)
