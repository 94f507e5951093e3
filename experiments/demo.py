"""The main job in small: python -m experiments.demo trains, measures and shows everything in runs/demo."""

from functools import partial

from jaxblt.cli.main import call
from jaxblt.cli.parsing import run

main = partial(call, "demo")

if __name__ == "__main__":
    run(main)
