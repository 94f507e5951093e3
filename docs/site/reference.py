"""The reference's pages: every public name of every room, below the room's docstring.

Plain Python without MkDocs, so that a test can ask which names the pages hold.
"""

import importlib
import pkgutil
from types import ModuleType

import jaxblt
import pallas_kernels

WITHOUT_ALL = {
    "jaxblt.run": ("Run", "load"),
    "jaxblt.training.loop": ("fit", "Fitted"),
    "jaxblt.layers": ("Linear", "MLP", "RMSNorm", "dense", "linears", "named"),
    "jaxblt.side_outputs": ("sow_loss", "sow_metric", "sow_price"),
}
"""Modules that people import from and that list no public names."""
MODULES = ("pallas_kernels.runtime",)
"""Modules that list their names and are no packages."""


def rooms() -> dict[str, tuple[str, ...]]:
    """Return the public names of each room, by the room's import path."""
    found = {name: tuple(importlib.import_module(name).__all__) for name in MODULES}
    for top in (jaxblt, pallas_kernels):
        for name in [top.__name__, *_packages(top)]:
            public = getattr(importlib.import_module(name), "__all__", ())
            if public:
                found[name] = tuple(public)
    return dict(sorted({**found, **WITHOUT_ALL}.items()))


def _packages(top: ModuleType) -> list[str]:
    walked = pkgutil.iter_modules(top.__path__, f"{top.__name__}.")
    names = [
        module.name
        for module in walked
        if module.ispkg and not module.name.rpartition(".")[2].startswith("_")
    ]
    return [inner for name in names for inner in (name, *_packages(importlib.import_module(name)))]


def pages() -> dict[str, str]:
    """Return the text of each page by its path: an index, and a page a room."""
    found = rooms()
    written = {path_of(room): _page(room, names) for room, names in found.items()}
    lines = [
        f"| [`{room}`]({path_of(room).rpartition('/')[2]}) | {len(names)} | {_first_line(room)} |"
        for room, names in found.items()
    ]
    about = (
        "Every public name, by the module that it is imported from.\n\n| module | names | |\n|---|---|---|\n"
    )
    return {"reference/index.md": f"# Reference\n\n{about}" + "\n".join(lines) + "\n", **written}


def path_of(room: str) -> str:
    """Return where a room's page lies, below the root of the site."""
    return f"reference/{room}.md"


def _page(room: str, names: tuple[str, ...]) -> str:
    about = (importlib.import_module(room).__doc__ or "").strip()
    return "\n\n".join([f"# {room}", about, *(f"::: {room}.{name}" for name in names)]) + "\n"


def _first_line(room: str) -> str:
    return (importlib.import_module(room).__doc__ or "").strip().partition("\n")[0]
