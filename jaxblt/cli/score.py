"""`jaxblt score`: see `jaxblt.cli.answers.score`."""

from collections.abc import Sequence

from jaxblt.cli.answers import score
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(score, argv, prog="jaxblt score"))
