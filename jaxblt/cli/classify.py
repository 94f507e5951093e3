"""`jaxblt classify`: see `jaxblt.cli.answers.classify`."""

from collections.abc import Sequence

from jaxblt.cli.answers import classify
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(classify, argv, prog="jaxblt classify"))
