"""Benchmarks lie in one folder a subject, and their imports make no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from experiments.benchmark.__main__ import BENCHMARKS, ROOMS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "experiments" / "benchmark"
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FOLDER.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Return the modules of benchmarks that a module imports anywhere, also within functions."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return named & MODULES.keys()


def room_of(module: str) -> str:
    """Return the folder of a module."""
    return module.split(".")[2]


def test_modules_and_rooms_import_without_circles() -> None:
    arrows = {name: imports_of(path) for name, path in MODULES.items()}
    assert sum(map(len, arrows.values())) > 50
    tuple(TopologicalSorter(arrows).static_order())
    rooms: dict[str, set[str]] = {}
    for name, found in arrows.items():
        rooms.setdefault(room_of(name), set()).update(map(room_of, found))
    tuple(TopologicalSorter({room: found - {room} for room, found in rooms.items()}).static_order())


def test_a_room_has_few_files() -> None:
    folders = [path for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in folders} == {*ROOMS, "figures"}
    assert max(len(list(path.glob("*.*"))) for path in folders) <= 15
    assert {path.name for path in FOLDER.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_every_command_has_its_module() -> None:
    assert BENCHMARKS.keys() == {name for names in ROOMS.values() for name in names}
    assert all(module in MODULES for module in BENCHMARKS.values())
