"""`jaxblt mutagenesis`: see `jaxblt.answers.commands.mutagenesis`."""

from collections.abc import Sequence

from jaxblt.answers.commands import mutagenesis
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parses, answers, and prints what was written."""
    print(parse(mutagenesis, argv, prog="jaxblt mutagenesis"))
