"""The collectives of a compiled program: what each device holds after every exchange."""

import math
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
# Take an asynchronous exchange's result from its "done": its "start" gives the operand and the groups.
_EXCHANGE = re.compile(
    rf"= (?P<types>.*?) (?P<kind>{'|'.join(KINDS)})(?P<done>-done)?\((?P<operand>%?[\w.-]*)"
)
_START = re.compile(rf"(?P<name>%?[\w.-]+) = .*? (?:{'|'.join(KINDS)})-start\(")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(?P<groups>(?:\{[0-9,]*\},?)*)\}")
_IOTA = re.compile(
    r"replica_groups=\[(?P<shape>[0-9,]+)\]<=\[(?P<dims>[0-9,]+)\](?:T\((?P<order>[0-9,]+)\))?"
)
_BY_AXIS = re.compile(r"replica_groups=mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\}")
_TYPE = re.compile(r"\b(?P<dtype>pred|[a-z]+?(?P<bits>[0-9]+)[a-z0-9]*)\[(?P<dims>[0-9,]*)\]")


class Collective(NamedTuple):
    """One array that an exchange leaves on a device.

    Attributes:
      kind: of the exchange, one of `KINDS`.
      dtype, shape: of the array on each device.
      bits: of an element.
      groups: devices that exchange with each other, by their places in the mesh; empty if the text does not tell.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bits: int
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the array on a device."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.bits // 8


def exchanges(program: str) -> list[list[Collective]]:
    """Return the arrays of each exchange in a compiled program's text.

    An exchange inside a loop stands there once.
    """
    lines = program.splitlines()
    started = {match["name"]: _groups(line) for line in lines if (match := _START.search(line))}
    found = []
    for line in lines:
        if match := _EXCHANGE.search(line):
            groups = started.get(match["operand"], ()) if match["done"] else _groups(line)
            found.append([_result(match["kind"], type_, groups) for type_ in _TYPE.finditer(match["types"])])
    return found


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that a line of the program names."""
    if match := _BY_AXIS.search(line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=([0-9]+)", match["mesh"])}
        named = re.findall(r"'(\w+)'", match["axes"])
        order = [*(axis for axis in sizes if axis not in named), *named]
        return _rows(
            [sizes[axis] for axis in sizes],
            [list(sizes).index(axis) for axis in order],
            math.prod(sizes[axis] for axis in named),
        )
    if match := _IOTA.search(line):
        shape, dims, order = (
            [int(number) for number in (match[part] or "").split(",") if number]
            for part in ("shape", "dims", "order")
        )
        return _rows(dims, order or list(range(len(dims))), shape[-1])
    match = _LISTED.search(line)
    listed = re.findall(r"\{([0-9,]*)\}", match["groups"]) if match else []
    return tuple(tuple(int(device) for device in group.split(",") if device) for group in listed)


def _rows(dims: list[int], order: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Return groups of `size` devices: all, counted in a grid of `dims` with reordered axes."""
    devices = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return tuple(map(tuple, devices.reshape(-1, size).tolist()))


def _result(kind: str, type_: re.Match[str], groups: tuple[tuple[int, ...], ...]) -> Collective:
    shape = tuple(int(d) for d in type_["dims"].split(",") if d)
    return Collective(kind, type_["dtype"], shape, int(type_["bits"] or 8), groups)
