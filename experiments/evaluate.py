"""Scores a run on a split of its data or of its task: python -m experiments.evaluate RUN_DIR [--split test]."""

from functools import partial

from jaxblt.cli.main import call
from jaxblt.cli.parsing import run

main = partial(call, "evaluate")

if __name__ == "__main__":
    run(main)
