"""The code keeps to its own style: short files and functions, docstrings, annotations, no prints."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = ("jaxblt", "pallas_kernels")
EVERYTHING = (*LIBRARY, "configs", "experiments", "tests")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 120
MIN_ANNOTATED = 0.95
KERNEL_FILES = re.compile(r"(mosaic_gpu|triton)\w*\.py")
# Programs and commands people run print, and so does the log of a run in a terminal; the rest returns or raises.
PROGRAMS = re.compile(r"(bench|doctor|runlog|__main__)\.py")
UNDONE = re.compile("TO" + "DO|FIX" + "ME|XX" + "X|Not" + "ImplementedError")
VERB_FIRST = (*LIBRARY, "configs", "experiments")
"""Rooms in which the docstring of every function begins with a verb."""
NO_VERBS = """
a all along among an and angle any as ascending at base both boxed but by byte causal compiled computed
content convolution cosine data decay depthwise each element entropy equal every exact example false first
fixed-point for free from frozen full gradient half held hidden how if imported in inside installed it kept
key largest last latent leading least length like linear logical logits loss made many masked matrix mean
median memory most neighbouring no none normed nothing of one only optional otherwise output outside over own
parameter parity past penalty per position product real recall refused right row rule scanned scratch segment
shape shared short side size softmax some spectrum squared standard state such summed text that the there this
those through true two under unit unless valid value what when where whether which whole whose why wide width
with within without
"""
"""What docstrings began with that is no verb. What ends with a single s, or is no word, is none either."""
VERB = re.compile(r"[A-Z][a-z]*(-[a-z]+)*([^s]|ss)")
SOMEBODYS_PATH = re.compile(r"[\"'\s](/home|/root|/work|/Users)" + "/")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _files(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}".rstrip()


@cache
def _found(path: Path) -> tuple[list[Function], list[ast.Call]]:
    """Return a file's functions and calls, by one walk for all tests."""
    nodes = list(ast.walk(_tree(path)))
    return [n for n in nodes if isinstance(n, Function)], [n for n in nodes if isinstance(n, ast.Call)]


def _functions(path: Path) -> list[Function]:
    return _found(path)[0]


def _public(body: list[ast.stmt], *, methods: bool) -> Iterator[Function | ast.ClassDef]:
    """Public classes and functions of a module, and the public methods of such classes if asked for."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if methods and isinstance(node, ast.ClassDef):
                yield from _public(node.body, methods=True)


def _arguments(function: Function) -> list[ast.arg]:
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return [argument for argument in named if argument.arg not in ("self", "cls")]


def test_there_is_something_to_check() -> None:
    for room in LIBRARY:
        assert _files(room), f"no Python files under {room}"


def test_files_are_short() -> None:
    lengths = {
        p.relative_to(ROOT): len(p.read_text(encoding="utf-8").splitlines()) for p in _files(*EVERYTHING)
    }
    long = {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long, f"split these files, {MAX_FILE_LINES} lines at most: {long}"


def test_gradients_by_hand_are_of_one_kind() -> None:
    """`jax.custom_vjp` alone says nothing of `reference_ops`, and is wrong to the second order in a scan."""
    naming = [path for path in _files(*LIBRARY) if "custom_vjp" in path.read_text(encoding="utf-8")]
    nodes = [(path.name, node) for path in naming for node in ast.walk(_tree(path))]
    named = {name for name, node in nodes if isinstance(node, ast.Attribute) and node.attr == "custom_vjp"}
    assert named == {"_own_gradient.py"}, "use pallas_kernels.runtime.OwnGradient"


def test_functions_are_short() -> None:
    long = []
    for path in _files(*LIBRARY, "configs", "experiments"):
        limit = MAX_KERNEL_LINES if KERNEL_FILES.fullmatch(path.name) else MAX_FUNCTION_LINES
        for function in _functions(path):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > limit:
                long.append(f"{_where(path, function)}: {lines} lines, {limit} at most")
    assert not long, "\n".join(long)


def test_public_modules_classes_and_functions_have_docstrings() -> None:
    """Methods are free: many only do what the class they come from says."""
    bare = [str(path.relative_to(ROOT)) for path in _files(*LIBRARY) if not ast.get_docstring(_tree(path))]
    for path in _files(*LIBRARY):
        public = _public(_tree(path).body, methods=False)
        bare += [_where(path, node) for node in public if not ast.get_docstring(node)]
    assert not bare, "without a docstring:\n" + "\n".join(bare)


def _begins_with_a_verb(docstring: str) -> bool:
    word = docstring.split(maxsplit=1)[0].rstrip(".,:;")
    return VERB.fullmatch(word) is not None and word.lower() not in NO_VERBS.split()


def _is_property(function: Function) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in function.decorator_list)


def _without_verb(functions: Iterable[Function]) -> list[tuple[Function, str]]:
    """Return functions and methods, each with the first line of its docstring that begins with no verb."""
    texts = [(f, ast.get_docstring(f)) for f in functions if not _is_property(f)]
    return [(f, text.splitlines()[0]) for f, text in texts if text and not _begins_with_a_verb(text)]


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found: dict[str, list[str]] = {}
    for path in _files(*VERB_FIRST):
        place = str(path.relative_to(ROOT))
        lines = [f"{_where(path, f)}: {line}" for f, line in _without_verb(_functions(path))]
        found.setdefault(str(Path(place).parent), []).extend(lines)
    counts = {room: len(lines) for room, lines in found.items() if lines}
    told = "\n".join(line for lines in found.values() for line in lines)
    assert not counts, f"begin with a verb in the imperative, such as 'Return ...': {counts}\n{told}"


@pytest.mark.parametrize("good", ["Return x.", "Fine-tune a run.", "Compress rows."])
@pytest.mark.parametrize(
    "bad", ["Returns x.", "Whether x is whole.", "The sum.", "x W.", "`init` with names."]
)
def test_a_docstring_that_begins_with_no_verb_is_found(good: str, bad: str) -> None:
    texts = {"one": good, "two": bad, "three": "The sum."}
    source = [f'    def {name}(self):\n        """{text}"""' for name, text in texts.items()]
    planted = ast.parse("\n".join(["class A:", *source[:2], "    @property", source[2]]))
    functions = (node for node in ast.walk(planted) if isinstance(node, Function))
    assert [(f.name, line) for f, line in _without_verb(functions)] == [("two", bad)]


def test_arguments_of_public_functions_are_annotated() -> None:
    total, bare = 0, []
    for path in _files(*LIBRARY):
        for node in _public(_tree(path).body, methods=True):
            if isinstance(node, Function):
                arguments = _arguments(node)
                total += len(arguments)
                bare += [f"{_where(path, node)}({a.arg})" for a in arguments if a.annotation is None]
    share = 1 - len(bare) / total
    assert share >= MIN_ANNOTATED, f"{share:.1%} annotated; missing:\n" + "\n".join(bare)


def test_the_library_does_not_print() -> None:
    prints = [
        _where(path, node)
        for path in _files(*LIBRARY)
        if not PROGRAMS.fullmatch(path.name) and path.parent.name != "cli"
        for node in _found(path)[1]
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, f"print in library code: {prints}"


@pytest.mark.parametrize(
    "pattern", [UNDONE, SOMEBODYS_PATH], ids=["left undone", "a path on somebody's machine"]
)
def test_nothing_is_left_in_the_code(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in [*_files(*EVERYTHING), ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "pyproject.toml"]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
