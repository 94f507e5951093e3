"""What the host launches of a program that was compiled for a GPU: CUDA graphs, and what lies in none."""

import re
from dataclasses import dataclass

LINE = re.compile(r"^( *)\d+: (k\w+)|^ *(No thunks)\.", re.MULTILINE)
"""A launch in XLA's list of them, indented by what it lies in; or the condition of a loop that launches nothing."""

LOOPS = ("kWhile", "kConditional")


@dataclass(frozen=True)
class Launches:
    """Launches of a program, each counted once however often its loop turns.

    Attributes:
      graphs: CUDA graphs.
      inside: kernels and copies in them.
      outside: those in none.
      loops: loops and conditions in none: the host asks the device where they go on.
      unordered: loops in a graph whose condition launches nothing. XLA puts them behind nothing that they read.
    """

    graphs: int
    inside: int
    outside: int
    loops: int
    unordered: int


def read_launches(text: str) -> Launches:
    """Read a file `*thunk_sequence_after_thunk_passes.txt` that XLA writes into `xla_dump_to`."""
    found = dict.fromkeys(("graphs", "inside", "outside", "loops", "unordered"), 0)
    graph: int | None = None
    for line in LINE.finditer(text):
        spaces, kind, nothing = line.groups()
        if nothing:
            found["unordered"] += graph is not None
            continue
        if graph is not None and len(spaces) <= graph:
            graph = None
        if kind == "kCommandBuffer":
            graph = len(spaces)
            found["graphs"] += 1
        elif kind not in LOOPS:
            found["outside" if graph is None else "inside"] += 1
        else:
            found["loops"] += graph is None
    return Launches(**found)
