"""Segments a file into patches: python -m experiments.patch FILE --run-dir RUN_DIR, or --mode space."""

from functools import partial

from jaxblt.cli.main import call
from jaxblt.cli.parsing import run

main = partial(call, "patch")

if __name__ == "__main__":
    run(main)
