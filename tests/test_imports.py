"""Imports point one way (pallas_kernels, jaxblt, configs, experiments), and `import jaxblt` stays light."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("pallas_kernels", "jaxblt", "configs", "experiments")
OTHER_FRAMEWORKS = frozenset({"torch", "tensorflow", "tensorboardX", "keras"})
RUN_APART = {
    Path("tests/adapters/merged_by_peft.py"),
    Path("tests/interchange/make_evo2.py"),
}
"""Scripts of tests that run as processes of their own."""
# Imported by the function that runs a kernel in Triton's language, whose own file `TRITON_KERNEL` needs it throughout.
LAZY_IN_KERNELS = {"jax_triton", "triton"}
TRITON_KERNEL = "triton_kernel"
OTHER_NAMES = {"orbax-checkpoint": "orbax", "absl-py": "absl", "scikit-learn": "sklearn"}
"""Modules of packages that are called something else."""
HEAVY = (
    "grain",
    "orbax",
    "tensorboard",
    "matplotlib",
    "tyro",
    "pyarrow",
    "torch",
    "tensorflow",
)


@dataclass(frozen=True)
class Import:
    """One imported module and the names taken from it; `lazy` when a function's body holds the import."""

    path: Path
    line: int
    module: str
    lazy: bool
    names: tuple[str, ...] = ()

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


@cache
def _imports(room: str, *, naming: frozenset[str] = frozenset()) -> list[Import]:
    """Return the imports of a room; with `naming`, of its files that contain one of these words."""
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not naming or any(word in text for word in naming):
            found += _walk(ast.parse(text, filename=str(path)), path.relative_to(ROOT), lazy=False)
    return found


def _walk(node: ast.AST, path: Path, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(path, child.lineno, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                package = path.parts[: len(path.parts) - child.level]
                base = ".".join([*package, *filter(None, [base])])
            yield Import(path, child.lineno, base, lazy, tuple(alias.name for alias in child.names))
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(child)
            yield from _walk(child, path, lazy=inside)


def _is_for_types(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`, which no program enters."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_benchmark(path: Path) -> bool:
    return "bench" in path.stem or "benchmark" in path.parts


def test_pallas_kernels_need_jax_numpy_and_jaxtyping_alone() -> None:
    allowed = {"jax", "jaxlib", "numpy", "jaxtyping", "pallas_kernels", *sys.stdlib_module_names}
    wrong = [
        str(i)
        for i in _imports("pallas_kernels")
        if i.top not in allowed
        and not (i.path.stem == TRITON_KERNEL and i.top == "triton")
        and not (i.lazy and (i.top in LAZY_IN_KERNELS or (_is_benchmark(i.path) and i.top not in ROOMS)))
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_in_tritons_language_are_imported_lazily() -> None:
    wrong = [str(i) for i in _imports("pallas_kernels") if i.module.endswith(TRITON_KERNEL) and not i.lazy]
    assert not wrong, "\n".join(wrong)


def test_no_op_reaches_into_another() -> None:
    """What ops share stands beside them, in `_conv` and the like; an op may call another's public function."""
    wrong = [
        str(i)
        for i in _imports("pallas_kernels")
        if len(i.path.parts) > 2
        and len(inside := i.module.split(".")) > 2
        and inside[0] == "pallas_kernels"
        and not inside[1].startswith("_")
        and inside[1] != i.path.parts[1]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS[1:])
def test_what_pallas_kernels_keeps_private_is_used_there_alone(room: str) -> None:
    """`pallas_kernels.runtime` has what a library needs beside the ops."""
    wrong = [
        f"{i} ({', '.join(i.names)})"
        for i in _imports(room)
        if i.top == "pallas_kernels"
        and any(part.startswith("_") for part in (*i.module.split("."), *i.names))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_one_that_is_built_on_it(room: str) -> None:
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    wrong = [str(i) for i in _imports(room) if i.top in later or i.top == "tests"]
    assert not wrong, "\n".join(wrong)


def test_no_module_of_jaxblt_imports_itself_through_others() -> None:
    """Imports of functions and of `TYPE_CHECKING` count: two files that need each other cannot be read apart."""
    assert not _circles(_modules_of_jaxblt())


def test_no_room_of_jaxblt_imports_itself_through_others() -> None:
    """A room is a folder of jaxblt, or a file beside the folders; most rooms have rooms of their own."""
    arrows = _modules_of_jaxblt()
    parts = [module.split(".") for module in arrows]
    for folder in sorted({".".join(names[:depth]) for names in parts for depth in range(1, len(names))}):
        inside = {module: imported for module, imported in arrows.items() if module.startswith(f"{folder}.")}
        assert not _circles(_between(inside, depth=folder.count(".") + 2)), folder


def test_only_commands_import_what_the_package_holds_for_users() -> None:
    """`jaxblt.load` is built on runs, so nothing that runs are built on takes it, or anything beside it."""
    wrong = [
        str(i)
        for i in _imports("jaxblt")
        if i.module == "jaxblt"
        and i.path.parts[1] != "cli"
        and not (i.names and all(map(_is_module, i.names)))
    ]
    assert not wrong, "\n".join(wrong)


def _is_module(name: str) -> bool:
    """Whether `from jaxblt import name` imports a file or a folder."""
    return any((ROOT / "jaxblt" / found).exists() for found in (name, f"{name}.py"))


def _between(arrows: dict[str, set[str]], depth: int) -> dict[str, set[str]]:
    """Return which of the rooms that the first `depth` words of names tell apart imports which."""
    rooms: dict[str, set[str]] = {_room(module, depth): set() for module in arrows}
    for module, imported in arrows.items():
        own = _room(module, depth)
        rooms[own] |= {_room(name, depth) for name in imported} & rooms.keys() - {own}
    return rooms


def _room(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def _modules_of_jaxblt() -> dict[str, set[str]]:
    """Each module with those that it imports. What a package's `__init__` collects for users is left out."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "jaxblt").rglob("*.py") if path.stem != "__init__"]
    arrows = {".".join(path.with_suffix("").parts): set[str]() for path in paths}
    for found in _imports("jaxblt"):
        module = ".".join(found.path.with_suffix("").parts)
        names = {found.module, *(f"{found.module}.{name}" for name in found.names)}
        if module in arrows:
            arrows[module] |= names & arrows.keys() - {module}
    return arrows


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the circles: what is left once all that imports nothing, or nothing else that is left, is taken away."""
    left = {module: set(imported) for module, imported in arrows.items()}
    while done := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in done}
    return [[module, *sorted(imported & left.keys())] for module, imported in sorted(left.items())]


def test_circles_are_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert _circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == [["a", "b"], ["b", "a"]]


def test_other_frameworks_are_peers_in_benchmarks_only_and_imported_lazily() -> None:
    wrong = [
        str(i)
        for room in (*ROOMS, "tests")
        for i in _imports(room, naming=OTHER_FRAMEWORKS)
        if i.top in OTHER_FRAMEWORKS and not (i.lazy and _is_benchmark(i.path)) and i.path not in RUN_APART
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_declared_is_imported() -> None:
    """Extras for GPUs bring JAX's plugins, which JAX imports, and those for development tools, which run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *extras["triton"],
        *extras["plot"],
        *extras["arrow"],
        *extras["remote"],
        *extras["serve"],
    ]
    unused = _modules(declared) - {i.top for room in ROOMS for i in _imports(room)}
    assert not unused, f"nothing imports {unused}: drop them from pyproject.toml"


def test_what_the_wheel_imports_is_declared() -> None:
    """At the top of a module: a dependency. In a function: of an extra too. `jaxlib` and `triton` come with others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, extras = project["dependencies"], [*chain(*project["optional-dependencies"].values())]
    always = _modules(core) | {"jaxlib", "pallas_kernels", "jaxblt", *sys.stdlib_module_names}
    lazily = always | _modules(extras) | LAZY_IN_KERNELS
    wrong = [
        str(i)
        for room in ("pallas_kernels", "jaxblt", "configs")
        for i in _imports(room)
        if i.top not in (lazily if i.lazy or i.path.stem == TRITON_KERNEL else always | {room})
        and not (i.lazy and _is_benchmark(i.path))
    ]
    assert not wrong, "\n".join(wrong)


def _modules(requirements: list[str]) -> set[str]:
    names = {re.match(r"[\w-]+", line).group() for line in requirements}  # pyright: ignore[reportOptionalMemberAccess]
    return {OTHER_NAMES.get(name, name.replace("-", "_")) for name in names}


def test_the_walk_sees_every_kind_of_import() -> None:
    source = "import a.b\nfrom .c import d\nfrom .. import e\ndef f():\n    if True:\n        import torch\n"
    found = list(_walk(ast.parse(source), Path("room/sub/file.py"), lazy=False))
    assert [(i.module, i.lazy) for i in found] == [
        ("a.b", False),
        ("room.sub.c", False),
        ("room", False),
        ("torch", True),
    ]


def test_imports_are_light_and_start_nothing() -> None:
    """Under 2 s on an idle machine; asserted by what the package and two rooms load, and then a training."""
    program = (
        "import sys; import jaxblt, jaxblt.data, jaxblt.patching;"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules];"
        "from jax._src import xla_bridge;"
        "print(','.join(heavy)); print(xla_bridge.backends_are_initialized());"
        "import jaxblt.training.loop; print([name for name in ('tensorflow', 'scipy') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    heavy, initialized, trained = run.stdout.splitlines()
    assert not heavy, f"imports load {heavy}: import these in the functions that use them"
    assert initialized == "False", "an import starts a JAX backend: nothing may happen at import"
    assert trained == "[]", f"training loads {trained}: import these in the functions that use them"


def test_what_is_slow_to_import_waits_for_who_calls_it() -> None:
    """SciPy's statistics and optimisers take half a second, in each command and each worker."""
    slow = [
        (i, {i.module, *(f"{i.module}.{name}" for name in i.names)}) for i in _imports("jaxblt") if not i.lazy
    ]
    wrong = [str(i) for i, named in slow if named & {"scipy.stats", "scipy.optimize"}]
    assert not wrong, "\n".join(wrong)
