"""The main job in small: python -m experiments.demo trains, measures and shows everything in runs/demo."""

from jaxblt.cli.demo import main
from jaxblt.cli.parsing import run

if __name__ == "__main__":
    run(main)
