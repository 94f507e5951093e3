"""Continues prompts with a trained run: python -m experiments.generate RUN_DIR --prompts "Once" "The"."""

from functools import partial

from jaxblt.cli.main import call
from jaxblt.cli.parsing import run

main = partial(call, "generate")

if __name__ == "__main__":
    run(main)
