"""`jaxblt import`: see `jaxblt.interchange.commands.import_run`."""

from collections.abc import Sequence

from jaxblt.cli.parsing import parse
from jaxblt.interchange.commands import import_run


def main(argv: Sequence[str]) -> None:
    """Parse, write, and print what was written."""
    print(parse(import_run, argv, prog="jaxblt import"))
