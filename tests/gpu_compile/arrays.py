"""The arrays of a compiled program."""

import math
import re

from tests.gpu_compile.schedule import computations

_MADE = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = (?P<type>.*?) (?P<name>[a-z][a-z\-]*)\(")
_FUSED = re.compile(r" fusion\(.*calls=%(?P<name>[\w.\-]+)")
_VIEWS = {"parameter", "get-tuple-element", "bitcast", "tuple", "while"}
"""Instructions that make no array of their own."""


def largest(text: str, dtype: str) -> int:
    """Numbers of the largest array of a dtype that lies in memory: in a fusion nothing does but its result."""
    parts = computations(text)
    fused = {found["name"] for lines in parts.values() for found in map(_FUSED.search, lines) if found}
    lines = [line for name, lines in parts.items() if name not in fused for line in lines]
    made = [found["type"] for found in map(_MADE.match, lines) if found and found["name"] not in _VIEWS]
    shapes = re.findall(rf"\b{dtype}\[([\d,]*)\]", " ".join(made))
    return max((math.prod(int(size) for size in shape.split(",") if size) for shape in shapes), default=0)
