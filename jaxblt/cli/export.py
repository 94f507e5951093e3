"""`jaxblt export`: see `jaxblt.interchange.commands.export`."""

from collections.abc import Sequence

from jaxblt.cli.parsing import parse
from jaxblt.interchange.commands import export


def main(argv: Sequence[str]) -> None:
    """Parse, write, and print what was written."""
    print(parse(export, argv, prog="jaxblt export"))
