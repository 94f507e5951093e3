"""Profiler traces: record a block, open the file, total the time of each operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from pallas_kernels.runtime import device_events, read_trace


@dataclass(frozen=True)
class OpTotal:
    """The count of an operation (a kernel on a GPU, an XLA operation on CPU), and its seconds in all."""

    name: str
    count: int
    seconds: float


@contextmanager
def trace(folder: str | Path) -> Iterator[Path]:
    """Record what host and devices do in the block.

    TensorBoard's profile tab, Perfetto and `op_totals` read it.

        with trace("runs/demo/trace"):
            jax.block_until_ready(step(state, batch))

    Wait for results inside the block. Python calls are not recorded: they would drown the rest.
    """
    path = Path(folder)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(path, create_perfetto_trace=False, profiler_options=options):
        yield path


def op_totals(folder: str | Path) -> list[OpTotal]:
    """Return device time of each operation in the newest trace under `folder`, longest first.

    Durations are added up as they are: an operation that contains others (a loop) counts their time as well.

    Raises:
      FileNotFoundError: there is no trace.
    """
    totals: dict[str, tuple[int, float]] = {}
    for _, name, start, end in device_events(read_trace(folder)):
        count, seconds = totals.get(name, (0, 0.0))
        totals[name] = count + 1, seconds + (end - start) * 1e-9
    rows = [OpTotal(name, count, seconds) for name, (count, seconds) in totals.items()]
    return sorted(rows, key=lambda row: -row.seconds)
