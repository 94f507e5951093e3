"""`jaxblt index`: see `jaxblt.answers.commands.index`."""

from collections.abc import Sequence

from jaxblt.answers.commands import index
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, make the index, and print what was written."""
    print(parse(index, argv, prog="jaxblt index"))
