"""Mixers, sources and tasks of one's own: modules that are imported before a command reads a run or a recipe."""

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

OPTION = "--import"
GROUP = "jaxblt.plugins"
"""Entry points of installed packages that name modules to import."""


def take_imports(argv: Sequence[str]) -> list[str]:
    """Import what --import names in a command line, and return the other words.

    It may come several times. A name is that of a module, here or installed, or of a Python file.

    Raises:
      ValueError: no name follows, or a module fails.
    """
    left, words = list(argv), []
    while left:
        word = left.pop(0)
        option, equals, name = word.partition("=")
        if option != OPTION:
            words.append(word)
            continue
        if not equals:
            name = left.pop(0) if left and not left[0].startswith("-") else ""
        import_plugin(name)
    return words


def import_plugin(name: str) -> None:
    """Import a module by its name, or a Python file.

    Raises:
      ValueError: there is none, or it fails; one line that says why.
      FileNotFoundError: there is no such file.
    """
    if not name:
        raise ValueError(f"{OPTION}: expected a module, or a Python file, got none")
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise FileNotFoundError(f"{OPTION} {name}: there is no such file")
        # Keep recipes, and JAX with them, out of commands that import nothing
        from jaxblt.cli.find_recipe import load_file

        load_file(name)
        return
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        importlib.import_module(name)
    except Exception as error:
        from jaxblt.training.stored.safe_files import one_line

        raise ValueError(
            f"{OPTION} {name}: {one_line(error)} ({type(error).__name__}); name a module of this folder or an "
            "installed one, or a Python file"
        ) from error


def load_plugins() -> None:
    """Import what installed packages offer under the entry points `jaxblt.plugins`.

    Raises:
      ValueError: one fails; names it and its package.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            from jaxblt.training.stored.safe_files import one_line

            package = point.dist.name if point.dist else "an installed package"
            raise ValueError(
                f"plugin {point.name!r} of {package} ({point.value}) cannot be imported: {one_line(error)}"
            ) from error
