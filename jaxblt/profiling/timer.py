"""Named times of parts of a program, nested as their blocks are."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxblt.text_table import format_table


@dataclass(frozen=True)
class PartTime:
    """Seconds of all blocks of one name below the same outer names."""

    count: int
    seconds: float


class Timer:
    """Times of named blocks: `with timer("step"): with timer("loss", wait): ...`.

    A block ends when what `wait` holds is computed: work that nothing waits for counts for the block after it. `times`
    has blocks by path, such as "step/loss"; those of an outer block include those of inner ones.
    """

    def __init__(self) -> None:
        self.times: dict[str, PartTime] = {}
        self._open: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[list[Any]]:
        """Time a block; arrays that it appends to the list are waited for at its end.

        Raises:
          ValueError: the name is empty or has a slash.
        """
        if not name or "/" in name:
            raise ValueError(f"a block's name must be a word without '/', got {name!r}")
        self._open.append(name)
        path, wait = "/".join(self._open), []
        self.times.setdefault(path, PartTime(0, 0.0))
        began = time.perf_counter()
        try:
            yield wait
            jax.block_until_ready(wait)
        finally:
            before = self.times[path]
            self.times[path] = PartTime(before.count + 1, before.seconds + time.perf_counter() - began)
            self._open.pop()

    def summary(self) -> str:
        """Return a table of blocks in the order in which they began, with calls, seconds and share of the outer."""
        rows: list[tuple[str, int, float, str]] = []
        for path, part in self.times.items():
            outer = self.times.get(path.rpartition("/")[0])
            share = "" if outer is None or not outer.seconds else f"{part.seconds / outer.seconds:.0%}"
            rows.append((path, part.count, part.seconds, share))
        return format_table(("block", "calls", "seconds", "of the outer"), rows)
