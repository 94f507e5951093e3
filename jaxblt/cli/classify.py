"""`jaxblt classify`: see `jaxblt.answers.commands.classify`."""

from collections.abc import Sequence

from jaxblt.answers.commands import classify
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(classify, argv, prog="jaxblt classify"))
