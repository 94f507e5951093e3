"""Memory of a recipe's train step on a GPU: python -m experiments.plan RECIPE [--mesh seq=8] [--context N]."""

from jaxblt.cli.parsing import run
from jaxblt.cli.plan import main

if __name__ == "__main__":
    run(main)
