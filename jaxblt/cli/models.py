"""`jaxblt models`: the runs that come with jaxblt."""

from collections.abc import Sequence

from jaxblt.boxed import boxed
from jaxblt.cli.parsing import parse
from jaxblt.evaluation import format_table


def models() -> None:
    """List the runs that come with jaxblt: every command that reads a run takes their names."""
    print(format_table(("run", "what"), [(name, about["title"]) for name, about in boxed().items()]))


def main(argv: Sequence[str]) -> None:
    """Parse and print."""
    parse(models, argv, prog="jaxblt models")
