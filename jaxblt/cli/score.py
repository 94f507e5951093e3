"""`jaxblt score`: see `jaxblt.answers.commands.score`."""

from collections.abc import Sequence

from jaxblt.answers.commands import score
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(score, argv, prog="jaxblt score"))
