"""`jaxblt index`: see `jaxblt.cli.answers.index`."""

from collections.abc import Sequence

from jaxblt.cli.answers import index
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, make the index, and print what was written."""
    print(parse(index, argv, prog="jaxblt index"))
