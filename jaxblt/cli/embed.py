"""`jaxblt embed`: see `jaxblt.cli.answers.embed`."""

from collections.abc import Sequence

from jaxblt.cli.answers import embed
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(embed, argv, prog="jaxblt embed"))
