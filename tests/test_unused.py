"""Every public function and class of the library is used by it, or shown in the code of a page."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARY = ("jaxblt", "pallas_kernels")
USERS = (*LIBRARY, "configs", "experiments")
FOR_TESTS = ("jaxblt.testing", "pallas_kernels._bench")
"""What tests are the users of: checks of mixers and programs, and the gate of every op's benchmark."""
READS = ast.Name | ast.Attribute | ast.Constant | ast.ImportFrom | ast.Import
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
PLACE = re.compile(r"[\w.]+:\w+")
"""A class as configs are stored by, such as "jaxblt.mixers.hyena.hyena:HyenaConfig"."""

Place = tuple[str, str | None]
"""A module, and a name in it; None for the module itself."""


@cache
def files() -> dict[str, Path]:
    """Return the files of all modules by name."""
    paths = [path for room in USERS for path in (ROOT / room).rglob("*.py") if "recipes" not in path.parts]
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in paths)
    return {".".join(part).removesuffix(".__init__"): path for part, path in zip(parts, paths, strict=True)}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files().items()}


@cache
def definitions() -> frozenset[Place]:
    """Return what modules of the library define in public."""
    return frozenset(
        (module, node.name)
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if module.startswith(LIBRARY)
    )


@cache
def reads(module: str) -> list[tuple[str | None, ast.AST]]:
    """Return the nodes that name something, each with the definition at a module's top that it stands in."""
    body = trees()[module].body
    found = ((getattr(part, "name", None), node) for part in body for node in ast.walk(part))
    return [(own, node) for own, node in found if isinstance(node, READS)]


@cache
def imports(module: str) -> dict[str, Place]:
    """Return what names mean that a module imports anywhere."""
    package = module if files()[module].name == "__init__.py" else module.rpartition(".")[0]
    found: dict[str, Place] = {}
    for _, node in reads(module):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {alias.asname or alias.name: (base, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: (alias.name, None) for alias in node.names if alias.asname}
    return found


def resolve(place: Place) -> Place:
    """Return where a name is defined that packages hand on."""
    module, name = place
    if place in definitions() or name is None or module not in trees():
        return place
    if (passed := imports(module).get(name, place)) != place:
        return resolve(passed)
    return (f"{module}.{name}", None) if f"{module}.{name}" in trees() else place


def uses(module: str) -> Iterator[Place]:
    """Yield what a module reads: names outside of their own definition, attributes of modules, stored classes."""
    known = {name: resolve(place) for name, place in imports(module).items()}
    for own, node in reads(module):
        if isinstance(node, ast.Name) and node.id != own:
            yield known.get(node.id, (module, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = known.get(node.value.id, (module, node.value.id))
            yield resolve((owner, node.attr)) if name is None else (owner, name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PLACE.fullmatch(node.value):
            owner, name = node.value.split(":")
            yield resolve((owner, name))


@cache
def shown() -> frozenset[str]:
    """Return the words in the code of all pages and notebooks."""
    pages = [
        page
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        if page.stem not in ("CHANGELOG", "features")
    ]
    code = [part for page in pages for part in CODE.findall(page.read_text(encoding="utf-8"))]
    for notebook in (ROOT / "experiments").rglob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        code += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return frozenset(re.findall(r"\w+", " ".join(code)))


def test_what_is_public_is_used_or_shown() -> None:
    """What fails is dead: use it where the library should, show it in a guide, or delete it with its tests."""
    used = {place for module in trees() for place in uses(module)}
    lost = [
        f"{module}.{name}"
        for module, name in definitions() - used
        if name not in shown() and not module.startswith(FOR_TESTS)
    ]
    assert not lost, f"nobody uses {', '.join(sorted(lost))}"


def test_the_walk_follows_what_packages_hand_on() -> None:
    assert resolve(("jaxblt.mixers", "HyenaConfig")) == ("jaxblt.mixers.hyena.hyena", "HyenaConfig")
    assert resolve(("jaxblt.mixers", "hyena")) == ("jaxblt.mixers.hyena", None)
    assert ("jaxblt.mixers.hyena.hyena", "Hyena") in set(uses("jaxblt.mixers.hyena.hyena"))
    assert "HyenaConfig" in shown()
