"""`jaxblt variants`: see `jaxblt.cli.answers.variants`."""

from collections.abc import Sequence

from jaxblt.cli.answers import variants
from jaxblt.cli.parsing import parse


def main(argv: Sequence[str]) -> None:
    """Parse, answer, and print what was written."""
    print(parse(variants, argv, prog="jaxblt variants"))
