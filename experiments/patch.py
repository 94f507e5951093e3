"""Segments a file into patches: python -m experiments.patch FILE --run-dir RUN_DIR, or --mode space."""

from jaxblt.cli.parsing import run
from jaxblt.cli.patch import main

if __name__ == "__main__":
    run(main)
