"""The page of the command line: what each command prints when asked for help."""

import contextlib
import io
import os

from jaxblt.cli import main
from jaxblt.cli.main import COMMANDS

WIDTH = "100"


def page() -> str:
    """Return the usage of the program and of each of its commands."""
    parts = [f"# Command line\n\n```text\n{main.usage()}\n```"]
    parts += [f"## jaxblt {name}\n\n```text\n{help_of(name)}\n```" for name in COMMANDS]
    return "\n\n".join(parts) + "\n"


def help_of(command: str) -> str:
    """Return what `jaxblt COMMAND --help` prints on a page."""
    said = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main.main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return said.getvalue().strip()
