"""The collectives of a compiled program: what each device holds after every exchange."""

import re
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
    "ragged-all-to-all",
)
# The result of an asynchronous exchange is that of its "done"; its "start" gives the operand as well.
_EXCHANGE = re.compile(rf"= (?P<types>.*?) (?P<kind>{'|'.join(KINDS)})(?:-done)?\(")
_TYPE = re.compile(r"\b(?P<dtype>pred|[a-z]+?(?P<bits>[0-9]+)[a-z0-9]*)\[(?P<dims>[0-9,]*)\]")


class Collective(NamedTuple):
    """One array that an exchange leaves on a device.

    Attributes:
      kind: of the exchange, one of `KINDS`.
      dtype, shape: of the array on each device.
      bits: of an element.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bits: int

    @property
    def bytes(self) -> int:
        """Size of the array on a device."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.bits // 8


def exchanges(program: str) -> list[list[Collective]]:
    """The arrays of each exchange in the text of a compiled program; one inside a loop is named once."""
    found = []
    for line in program.splitlines():
        if match := _EXCHANGE.search(line):
            found.append([_result(match["kind"], type_) for type_ in _TYPE.finditer(match["types"])])
    return found


def _result(kind: str, type_: re.Match[str]) -> Collective:
    shape = tuple(int(d) for d in type_["dims"].split(",") if d)
    return Collective(kind, type_["dtype"], shape, int(type_["bits"] or 8))
