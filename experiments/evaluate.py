"""Scores a run on a split of its data or of its task: python -m experiments.evaluate RUN_DIR [--split test]."""

from jaxblt.cli.evaluate import main
from jaxblt.cli.parsing import run

if __name__ == "__main__":
    run(main)
