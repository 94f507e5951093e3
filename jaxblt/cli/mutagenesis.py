"""`jaxblt mutagenesis`: see `jaxblt.cli.answers.mutagenesis`."""

from collections.abc import Sequence

from jaxblt.cli.answers import mutagenesis
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(mutagenesis, argv, prog="jaxblt mutagenesis"))
