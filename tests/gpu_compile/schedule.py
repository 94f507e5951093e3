"""What a compiled GPU program runs beside its exchanges, from the order of its instructions."""

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.\-]+) \(")
_KERNEL = re.compile(r'custom_call_target="(?:mosaic_gpu|__cudnn)')
_CALLED = re.compile(r"calls=%(?P<name>[\w.\-]+)")
_EXCHANGE = re.compile(
    r"%(?P<name>[\w.\-]+) = .*? collective-permute(?P<part>-start|-done|)\((?P<operand>[^)]*)"
)


class Exchange(NamedTuple):
    """A message to the next device, and how many attention kernels are launched between its start and the wait."""

    name: str
    kernels: int


def exchanges(text: str) -> list[Exchange]:
    """Those of the entry computation of a scheduled program, in order; a synchronous one has no kernels.

    Raises:
      ValueError: there is none, or one that is never waited for.
    """
    parts = computations(text)
    with_kernels = {name for name, lines in parts.items() if any(map(_KERNEL.search, lines))}
    found: dict[str, int] = {}
    waited_for: set[str] = set()
    for line in parts["ENTRY"]:
        exchange, called = _EXCHANGE.search(line), _CALLED.search(line)
        if exchange and exchange["part"] == "-done":
            waited_for.add(re.findall(r"%([\w.\-]+)", exchange["operand"])[-1])
        elif exchange:
            found[exchange["name"]] = 0
            if not exchange["part"]:
                waited_for.add(exchange["name"])
        elif _KERNEL.search(line) or (called and called["name"] in with_kernels):
            for name in found.keys() - waited_for:
                found[name] += 1
    if not found or found.keys() != waited_for:
        raise ValueError(f"exchanges {sorted(found)} are waited for as {sorted(waited_for)}: not a schedule")
    return [Exchange(*item) for item in found.items()]


def computations(text: str) -> dict[str, list[str]]:
    """Lines of each, by name; ENTRY for the one that is run."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if begun := _COMPUTATION.match(line):
            found["ENTRY" if line.startswith("ENTRY") else begun["name"]] = lines = []
        elif found:
            lines.append(line)
    return found
