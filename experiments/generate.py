"""Continues prompts with a trained run: python -m experiments.generate RUN_DIR --prompts "Once" "The"."""

from jaxblt.cli.generate import main
from jaxblt.cli.parsing import run

if __name__ == "__main__":
    run(main)
