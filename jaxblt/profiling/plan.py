"""The memory of a train step on a GPU, and the longest rows that fit, from what the compiler says of the step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxblt.profiling.collectives import exchanges

FILLED = 0.95
"""Share of the memory that a step has to fill to be called the longest that fits."""


def device_bytes(tree: Any) -> int:
    """Return how many bytes each device holds of a pytree of arrays.

    Shapes with shardings do as well.
    """
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each device during a step of training.

    Attributes:
      arguments: of what the step is given, by part.
      temporaries: activations, gradients and buffers of exchanges, as the compiler lays them out.
      results: of results that do not take over the memory of an argument, and padding.
      host: temporaries in the host's pinned memory, where a policy offloads; not in the total.
      exchanged: results of collectives, by kind: how many, the largest, and the sum. They lie in the temporaries, those
        of different times in the same place.
    """

    arguments: Mapping[str, int]
    temporaries: int
    results: int
    host: int
    exchanged: Mapping[str, tuple[int, int, int]]

    @property
    def total(self) -> int:
        """The peak: what has to be free on the device."""
        return sum(self.arguments.values()) + self.temporaries + self.results

    def __str__(self) -> str:
        rows = [*self.arguments.items(), ("temporaries", self.temporaries), ("results", self.results)]
        lines = [f"  {name:<28}{size / 1e9:>9.3f} GB" for name, size in [*rows, ("total", self.total)]]
        if self.host:
            lines.append(f"  {'in host memory':<28}{self.host / 1e9:>9.3f} GB")
        for kind, (count, largest, together) in self.exchanged.items():
            figures = f"largest {largest / 1e9:.3f} GB, results together {together / 1e9:.3f} GB"
            lines.append(f"  {count} x {kind} in the program: {figures} (within temporaries)")
        return "\n".join(lines)


def step_memory(compiled: Any, parts: Mapping[str, Any]) -> StepMemory:
    """Return what memory a compiled step needs.

    Args:
      compiled: `jit(step).lower(...).compile()`, for any device.
      parts: its arguments, as named pytrees of shapes with shardings; also those that the step does not read.

    Raises:
      ValueError: the compiler tells nothing of memory.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("the compiler of this platform does not tell what memory a program takes")
    arguments = {name: device_bytes(tree) for name, tree in parts.items()}
    unnamed = max(0, analysis.argument_size_in_bytes - sum(arguments.values()))
    by_kind: dict[str, list[int]] = {}
    for arrays in filter(None, exchanges(compiled.as_text() or "")):
        by_kind.setdefault(arrays[0].kind, []).append(sum(array.bytes for array in arrays))
    return StepMemory(
        arguments=arguments,
        temporaries=analysis.temp_size_in_bytes,
        results=unnamed + analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        host=analysis.host_temp_size_in_bytes,
        exchanged={kind: (len(sizes), max(sizes), sum(sizes)) for kind, sizes in by_kind.items()},
    )


@dataclass(frozen=True)
class Line:
    """bytes = base + slope · context."""

    base: float
    slope: float

    @staticmethod
    def through(first: tuple[int, int], second: tuple[int, int]) -> "Line":
        """Return the line through two points (context, bytes).

        Raises:
          ValueError: more context takes no more memory, which no step does.
        """
        (x, y), (u, v) = sorted((first, second))
        if u == x or v <= y:
            raise ValueError(
                f"{y:,} bytes at {x:,} and {v:,} at {u:,}: memory does not grow with the context"
            )
        slope = (v - y) / (u - x)
        return Line(y - slope * x, slope)

    def at(self, context: float) -> float:
        """Return bytes at a context."""
        return self.base + self.slope * context

    def context(self, memory: float) -> float:
        """Return the context that takes `memory` bytes."""
        return (memory - self.base) / self.slope


class Longest(NamedTuple):
    """The longest context found to fit.

    Attributes:
      context: bytes of a row.
      memory: bytes on each device at this context, from the compiler.
      predicted: bytes by the line that led to this context; None for one of the first lengths.
      line: of the last fit.
    """

    context: int
    memory: int
    predicted: float | None
    line: Line


def longest_context(
    measure: Callable[[int], int],
    *,
    memory: float,
    lengths: tuple[int, int],
    multiple: int,
    checks: int = 3,
) -> Longest | None:
    """Return the longest context whose step fits, by a line through two lengths.

    The line names a length, and the step is compiled at this length. That is enough if memory grows in proportion. If
    it grows faster, the length does not fit. Then the next line joins the longest length that fits to the shortest that
    does not, and lies above the memory between them.

    Args:
      measure: bytes on a device at a context; one compilation a call.
      memory: bytes of a device.
      lengths: two different contexts to begin with.
      multiple: contexts are multiples of it.
      checks: the most lengths to measure beyond the two; the search ends when `FILLED` of the memory is used.

    Returns:
      None if no length that was measured fits.

    Raises:
      ValueError: memory does not grow from one of the lengths to the other.
    """
    points = {length: measure(length) for length in lengths}
    predicted: dict[int, float] = {}
    for _ in range(checks):
        line = _next_line(points, memory)
        length = int(line.context(memory) // multiple) * multiple
        if length < multiple or length in points:
            break
        predicted[length] = line.at(length)
        points[length] = measure(length)
        if FILLED * memory <= points[length] <= memory:
            break
    fitting = [length for length, size in points.items() if size <= memory]
    if not fitting:
        return None
    best = max(fitting)
    return Longest(best, points[best], predicted.get(best), _next_line(points, memory))


MOST_ROWS = 2**20
"""The most rows that `largest_batch` asks for."""


def largest_batch(
    measure: Callable[[int], int], *, memory: float, multiple: int = 1
) -> tuple[int, dict[int, int]] | None:
    """Return the largest number of rows whose step fits, and the bytes of every number that was measured.

    It is exact if memory grows with the rows: this number fits, and `multiple` more do not. A line through measured
    numbers of rows gives the next one to try; without such a line the interval is halved.

    Args:
      measure: bytes on a device by rows; one compilation a call.
      memory: bytes of a device.
      multiple: of which rows are multiples.

    Returns:
      None if `multiple` rows do not fit.
    """
    sizes = {multiple: measure(multiple)}
    if sizes[multiple] > memory:
        return None
    fits, fails, rows = multiple, None, 2 * multiple
    while fits < MOST_ROWS and (fails is None or fails - fits > multiple):
        sizes[rows] = measure(rows)
        if sizes[rows] <= memory:
            fits = rows
        else:
            fails = rows
        rows = _next_rows(sizes, memory, multiple, fits, fails)
    return fits, sizes


def _next_rows(sizes: Mapping[int, int], memory: float, multiple: int, fits: int, fails: int | None) -> int:
    """Return the rows that a line says fill the memory, or every second time those halfway to what does not fit."""
    (x, y), (u, v) = sorted(sizes.items())[-2:] if fails is None else ((n, sizes[n]) for n in (fits, fails))
    filled = x + (memory - y) * (u - x) / (v - y) if v > y else 4 * u
    if fails is not None and len(sizes) % 2 == 0:
        filled = (fits + fails) / 2
    most = 4 * fits if fails is None else fails - multiple
    return max(min(int(filled // multiple) * multiple, most), fits + multiple)


def _next_line(points: Mapping[int, int], memory: float) -> Line:
    """Return the line through the points on both sides of the memory.

    If all are on one side it goes through the two nearest to it.
    """
    below = sorted(point for point in points.items() if point[1] <= memory)
    above = sorted(point for point in points.items() if point[1] > memory)
    pair = (below[-1], above[0]) if below and above else tuple(below[-2:] or above[:2])
    return Line.through(*pair)


def first_that_fits[T](
    choices: Mapping[str, T], measure: Callable[[T], int], memory: float
) -> tuple[str | None, dict[str, int]]:
    """Return the first choice whose step fits, or None, and the bytes of every choice tried."""
    tried = {}
    for name, choice in choices.items():
        tried[name] = measure(choice)
        if tried[name] <= memory:
            return name, tried
    return None, tried
