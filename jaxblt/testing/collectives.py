"""What a test asks of a compiled program's collectives."""

from itertools import chain
from typing import Any

from jaxblt.profiling.collectives import Collective, exchanges


def collectives(compiled: Any) -> list[Collective]:
    """All arrays that the exchanges of `jit(f).lower(...).compile()` leave on a device."""
    return list(chain.from_iterable(exchanges(compiled.as_text() or "")))


def spanning(
    found: list[Collective], length: int, *, kinds: tuple[str, ...] = ("all-gather",)
) -> list[Collective]:
    """Those of `kinds` whose result has a whole sequence on it: a dimension that is a multiple of `length`.

    Give the sequence a length (say 8 x 37) that no other dimension is a multiple of.
    """
    return [c for c in found if c.kind in kinds and any(d and d % length == 0 for d in c.shape)]
