"""`jaxblt index`: see `jaxblt.answers.commands.index`."""

from collections.abc import Sequence

from jaxblt.answers.commands import index
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parses, makes the index, and prints what was written."""
    print(parse(index, argv, prog="jaxblt index"))
