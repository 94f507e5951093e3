"""A script that shows a finding: the bridge's lines, the input, and the property's lines."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from jaxblt.testing.conformance.bench import Bench, Measured
from jaxblt.testing.conformance.cases import Case
from jaxblt.testing.conformance.helpers import host
from jaxblt.testing.conformance.properties import Property
from jaxblt.testing.conformance.subject import Layer

DISTANCES = {
    "float32": "float(abs(actual - expected).max())",
    "bfloat16": "float(((host(actual) - host(expected)) ** 2).mean() ** 0.5)",
}
"""What scripts print, by dtype."""


def write_script(prop: Property, bench: Bench, case: Case, measured: Measured) -> str:
    """Return Python that needs the layer's package and NumPy, and prints the error beside its tolerance."""
    given = bench.given(prop, case)
    lines = ["import numpy as np", *_bridge(bench.subject.make, given)]
    if bench.subject.dtype == "bfloat16":
        given["host"] = host
    lines += [
        line for name in ("host", "form", "gradient") if name in given for line in _function(name, given)
    ]
    if "start" in given and bench.layer.start is None:
        lines.append("start = lambda rows: None")
    if "reference" in given and bench.layer.reference is None:
        lines.append('reference = lambda x: call(x.astype("float32"))[0]')
    lines += ["", f"x = {case.source()}"]
    told = [f"{name} = {given[name]!r}" for name in ("cut", "decays", "dtype", "steps") if name in given]
    body, result = _body(prop.check)
    lines += [*(["; ".join(told)] if told else []), *body, f"actual, expected = {result}"]
    return "\n".join([*lines, _last(bench, measured)]) + "\n"


def _last(bench: Bench, measured: Measured) -> str:
    if measured.says:
        return f"print(actual, expected)  # {measured.says}"
    most = measured.limit * measured.unit
    return f"print({DISTANCES[bench.subject.dtype]})  # at most {most:.2g} was expected"


def _bridge(make: Callable[[], Layer] | str, given: dict[str, Any]) -> list[str]:
    """Return the lines of a bridge, without the functions that a property does not use.

    What was typed into an interpreter has none to show.
    """
    try:
        lines = make.splitlines() if isinstance(make, str) else _body(make)[0]
    except OSError:
        return [f"# the lines of {make} are not in a file: put them here"]
    unused = {
        line
        for node in ast.parse("\n".join(lines)).body
        if _defined(node) in {"start", "reference"} - given.keys()
        for line in range(node.lineno - 1, node.end_lineno or node.lineno)
    }
    return [_plain(line) for at, line in enumerate(lines) if at not in unused and line.strip()]


def _defined(node: ast.stmt) -> str:
    """Return the name that a function or an assignment defines, or nothing."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.name if isinstance(node, ast.FunctionDef) else ""


def _plain(line: str) -> str:
    """Return a line without annotations and remarks to linters."""
    line = re.sub(r"  # noqa.*", "", line)
    if not line.lstrip().startswith("def "):
        return line
    return re.sub(r": \w+\b|(?<=\)) -> \w+", "", line).replace(" = ", "=")


def _body(function: Callable[..., Any]) -> tuple[list[str], str]:
    """Return the lines of a function up to its last, and what the last returns."""
    source = textwrap.dedent(inspect.getsource(function))
    defined = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    docstring = ast.get_docstring(defined) is not None
    statements = defined.body[1:] if docstring else defined.body
    *_, last = statements
    if not isinstance(last, ast.Return) or last.value is None:
        raise ValueError(f"{function.__name__} must end with a return, as scripts show its lines")
    lines = source.splitlines()[statements[0].lineno - 1 : last.lineno - 1]
    returned = ast.get_source_segment(source, last.value) or ""
    return [_plain(line) for line in textwrap.dedent("\n".join(lines)).splitlines()], " ".join(
        returned.split()
    )


def _function(name: str, given: dict[str, Any]) -> list[str]:
    """Return the lines of a helper under the name that properties call it by."""
    body, returned = _body(given[name])
    arguments = ", ".join(inspect.signature(given[name]).parameters)
    return [f"def {name}({arguments}):", *(f"    {line}" for line in body), f"    return {returned}"]
