"""`jaxblt export`: see `jaxblt.interchange.commands.export`."""

from collections.abc import Sequence

from jaxblt.cli.parsing import parse
from jaxblt.interchange.commands import export


def main(argv: Sequence[str]) -> None:
    """Parses, writes, and prints what was written."""
    print(parse(export, argv, prog="jaxblt export"))
