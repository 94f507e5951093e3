"""Find the tests that a change can reach by imports: `python -m tests.reach main` prints arguments for pytest.

The change is what differs from the commit at which this branch left the given one, with untracked files. A name that a
package's `__init__` re-exports is followed to the module that defines it, so one mixer does not reach all users of
`jaxblt.mixers`. Imports inside functions count, and so do modules and files that are named in a string.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("pallas_kernels", "jaxblt", "configs", "experiments", "tests")
OF_THE_TREE = ("annotations", "documents", "imports", "outputs", "random_keys", "style", "unused")
"""Tests that read every file: `tests/test_*.py`."""
FOR_ALL = ("tests/conftest.py", "tests/selection.py", "pyproject.toml", "constraints.txt")
"""Files that every test depends on."""


class Sources:
    """The Python files of a tree and what each of them imports.

    Attributes:
      trees: path of each file -> its syntax tree.
      modules: dotted name -> path.
    """

    def __init__(self, root: Path) -> None:
        paths = [path for room in ROOMS for path in (root / room).rglob("*.py")]
        self.trees = {str(p.relative_to(root)): ast.parse(p.read_text(encoding="utf-8")) for p in paths}
        self.modules = {_dotted(path): path for path in self.trees}

    def imported(self, path: str) -> set[str]:
        """Paths that a file imports, or names as `package.module` or `package.module:name` in a string."""
        found: set[str] = set()
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Import):
                found.update(filter(None, (self._module(alias.name) for alias in node.names)))
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(path, node)
                found.update(filter(None, (self._defining(base, alias.name) for alias in node.names)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
                found.update(filter(None, [self._module(node.value.partition(":")[0])]))
        return found | {str(parent / "conftest.py") for parent in Path(path).parents} & set(self.trees)

    def named(self, file: str) -> Iterator[str]:
        """Paths of the files that have another file's name in a string."""
        name = Path(file).name
        for path, tree in self.trees.items():
            strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            if any(isinstance(value, str) and name in value for value in strings):
                yield path

    def _module(self, name: str) -> str | None:
        # The wheel has the recipes as jaxblt.recipes, by a link
        return self.modules.get(name.replace("jaxblt.recipes", "configs", 1))

    def _defining(self, base: str, name: str) -> str | None:
        """The module that `from base import name` reaches."""
        path = self._module(f"{base}.{name}") or self._module(base)
        if path is None or not path.endswith("__init__.py") or path == self._module(f"{base}.{name}"):
            return path
        for node in self.trees[path].body:
            if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
                return self._defining(_absolute(path, node), name) or path
        return path


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _absolute(path: str, node: ast.ImportFrom) -> str:
    parts = Path(path).parts
    package = parts[: len(parts) - node.level] if node.level else ()
    return ".".join([*package, *filter(None, [node.module])])


def reached(sources: Sources, changed: Iterable[str]) -> list[str]:
    """Return the test files that a change of these files can reach, the files themselves included."""
    changed = set(changed)
    tests = [path for path in sources.trees if Path(path).name.startswith("test_")]
    if changed & set(FOR_ALL):
        return sorted(tests)
    touched = changed & set(sources.trees)
    touched |= {path for file in changed - touched for path in sources.named(file)}
    users: dict[str, set[str]] = {}
    for path in sources.trees:
        for module in sources.imported(path):
            users.setdefault(module, set()).add(path)
    waiting = list(touched)
    while waiting:
        new = users.get(waiting.pop(), set()) - touched
        touched |= new
        waiting += new
    return sorted(
        {path for path in tests if path in touched} | {f"tests/test_{name}.py" for name in OF_THE_TREE}
    )


def closest(changed: Iterable[str]) -> set[str]:
    """Return the test files that changed, and those that have the names of changed modules at their places."""
    paths = [Path(path) for path in changed]
    named = {path.with_name(f"test_{path.name}") for path in paths if path.suffix == ".py"}
    places = {
        Path("tests", path.relative_to("jaxblt") if path.parts[0] == "jaxblt" else path) for path in named
    }
    return {str(path) for path in places} | {str(path) for path in paths if path.parts[0] == "tests"}


def changed_since(base: str, root: Path) -> set[str]:
    """Return the files of a work tree that differ from where it left `base`, deleted ones included."""

    def git(*args: str) -> list[str]:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (fork,) = git("merge-base", base, "HEAD")
    tracked = git("diff", "--name-only", "--no-renames", fork)
    return {*tracked, *git("ls-files", "--others", "--exclude-standard")}


def main(base: str) -> None:
    """Print the test files, and of those that are closest to a change that all their cases run."""
    changed = changed_since(base, ROOT)
    tests = reached(Sources(ROOT), changed)
    print(*tests, *(f"--written={path}" for path in tests if path in closest(changed)))


if __name__ == "__main__":
    main(*sys.argv[1:])
