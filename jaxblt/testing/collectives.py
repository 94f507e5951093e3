"""The collectives of a compiled program, with their shapes."""

import re
from typing import Any, NamedTuple

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)
_LINE = re.compile(rf"= (?P<types>.*?) (?P<kind>{'|'.join(KINDS)})(?:-start)?\(")
_TYPE = re.compile(r"([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_BYTES = re.compile(r"\d+")


class Collective(NamedTuple):
    """One exchange: what each device holds after it."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    source: str

    @property
    def bytes(self) -> int:
        """Size of the result on a device."""
        bits = 8 if self.dtype == "pred" else int(_BYTES.findall(self.dtype)[0])
        return int(np.prod(self.shape, dtype=np.int64)) * bits // 8


def collectives(compiled: Any) -> list[Collective]:
    """All of `jit(f).lower(...).compile()`; a tuple's parts one by one."""
    found = []
    for line in (compiled.as_text() or "").splitlines():
        if match := _LINE.search(line):
            name = re.search(r'op_name="([^"]*)"', line)
            for dtype, dims in _TYPE.findall(match["types"]):
                shape = tuple(int(d) for d in dims.split(",") if d)
                found.append(Collective(match["kind"], dtype, shape, name[1] if name else ""))
    return found


def spanning(
    found: list[Collective], length: int, *, kinds: tuple[str, ...] = ("all-gather",)
) -> list[Collective]:
    """Those of `kinds` whose result has a whole sequence on it: a dimension that is a multiple of `length`.

    Give the sequence a length (say 8 x 37) that no other dimension is a multiple of.
    """
    return [c for c in found if c.kind in kinds and any(d and d % length == 0 for d in c.shape)]
