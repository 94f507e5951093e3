"""Whether `make gpu-compile` has anything to do: a hash of all that its programs are made of, against the accepted one.

It runs where nothing is installed yet, so it imports the standard library alone.
"""

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ACCEPTED = HERE / "accepted_sources.json"
PROGRAMS = tuple(
    f"tests.gpu_compile.{name}" for name in ("__main__", "plan", "ring", "jla", "long_rows", "graphs")
)
DATA = (
    "constraints.txt",
    "tests/gpu_compile/accepted.json",
    "jaxblt/profiling/targets/*.txt",
    "pallas_kernels/*/tuned/*.json",
)
"""What is read besides modules; the first has the versions of JAX, its CUDA plugin, Triton, ptxas and cuDNN."""


def digest(root: Path = ROOT, programs: Iterable[str] = PROGRAMS) -> str:
    """Of the programs' modules without comments and docstrings, of those that they import, of `DATA` and of Python."""
    found = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in sorted(modules(root, programs)):
        found.update(f"\n{path.relative_to(root)}\n{_code(path)}".encode())
    for path in sorted(path for pattern in DATA for path in root.glob(pattern)):
        found.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def modules(root: Path, names: Iterable[str]) -> set[Path]:
    """Files of these modules and of all below `root` that they import, at once or in a function."""
    found: set[Path] = set()
    left = list(names)
    while left:
        parts = left.pop().split(".")
        for i in range(len(parts)):
            for path in (
                root.joinpath(*parts[: i + 1], "__init__.py"),
                root.joinpath(*parts[: i + 1]).with_suffix(".py"),
            ):
                if path not in found and path.is_file():
                    found.add(path)
                    left += _imported(path, root)
    return found


def _imported(path: Path, root: Path) -> Iterator[str]:
    """Names of modules, and of what is imported from them, as that may be one too."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(root).parts[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from (f"{module}.{name.name}" for name in node.names)


def _code(path: Path) -> str:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_text(line)]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main() -> int:
    """0 if there is nothing to compile."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_compile.sources")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--accept", action="store_true", help="compile again, whatever was accepted")
    which.add_argument("--write", action="store_true", help=f"write {ACCEPTED.name}: all has been compiled")
    arguments, now = parser.parse_args(), digest()
    if arguments.write:
        ACCEPTED.write_text(json.dumps({"digest": now}) + "\n", encoding="utf-8")
        print(
            f"gpu-compile: commit {ACCEPTED.relative_to(ROOT)}, and it has nothing to do till a source changes"
        )
        return 0
    if (
        arguments.accept
        or not ACCEPTED.is_file()
        or json.loads(ACCEPTED.read_text(encoding="utf-8"))["digest"] != now
    ):
        return 1
    print("gpu-compile: nothing changed since it was accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
