"""The reference holds every public name of every room."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jaxblt
import pallas_kernels

SITE = Path(__file__).parents[2] / "docs" / "site"


@pytest.fixture(scope="module")
def reference():
    """The script that writes the pages, which MkDocs finds by its folder."""
    sys.path.insert(0, str(SITE))
    try:
        yield importlib.import_module("reference")
    finally:
        sys.path.remove(str(SITE))


def rooms() -> list[ModuleType]:
    """Every package that says what is public, found by another way than the script's."""
    found = [
        importlib.import_module(module.name)
        for top in (jaxblt, pallas_kernels)
        for module in pkgutil.walk_packages(top.__path__, f"{top.__name__}.")
        if module.ispkg and "._" not in module.name
    ]
    return [room for room in (jaxblt, *found) if hasattr(room, "__all__")]


def test_every_public_name_is_in_the_reference(reference):
    pages = reference.pages()
    shown = {name for text in pages.values() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    public = {f"{room.__name__}.{name}" for room in rooms() for name in room.__all__}
    assert len(public) > 200
    assert public <= shown
    assert "jaxblt.run.Run" in shown


def test_every_name_of_the_reference_exists_and_every_page_is_listed(reference):
    pages = reference.pages()
    for room, names in reference.rooms().items():
        assert not [name for name in names if not hasattr(importlib.import_module(room), name)]
        assert f"({reference.path_of(room).removeprefix('reference/')})" in pages["reference/index.md"]
        assert reference.path_of(room) in pages
    assert "reference/" in (SITE / "mkdocs.yml").read_text(encoding="utf-8")
