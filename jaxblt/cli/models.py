"""`jaxblt models`: the runs that come with jaxblt."""

from jaxblt.boxed import boxed
from jaxblt.evaluation import format_table


def models() -> None:
    """List the runs that come with jaxblt: every command that reads a run takes their names."""
    print(format_table(("run", "what"), [(name, about["title"]) for name, about in boxed().items()]))
