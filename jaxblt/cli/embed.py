"""`jaxblt embed`: see `jaxblt.answers.commands.embed`."""

from collections.abc import Sequence

from jaxblt.answers.commands import embed
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(embed, argv, prog="jaxblt embed"))
