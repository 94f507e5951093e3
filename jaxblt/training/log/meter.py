"""Speed of a loop: bytes per second, share of time spent waiting for data, utilisation, memory; and its trace."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxblt.profiling.trace import trace
from jaxblt.training.flops import mfu


@dataclass(frozen=True)
class Cost:
    """Matmul FLOPs of training: `byte` for each byte and `patch` for each patch.

    Attributes:
      byte, patch: see above; patch is 0 for a model without patches.
    """

    byte: float
    patch: float = 0.0

    def per_byte(self, bytes_per_patch: float | None = None) -> float:
        """Return the FLOPs on a byte and its share of a patch."""
        return self.byte + (self.patch / bytes_per_patch if bytes_per_patch else 0.0)


class Meter:
    """Times the steps between two readings; a reading must follow a fetch from the devices.

    Args:
      cost: of the model.
      peak: matmul FLOP/s of all devices together; None if unknown.
      seconds: of training before this process.
    """

    def __init__(self, cost: Cost, peak: float | None, *, seconds: float = 0.0) -> None:
        self.cost, self.peak = cost, peak
        self._began = time.perf_counter() - seconds
        self.restart()

    def restart(self) -> None:
        """Forget the steps since the last reading: they compiled, evaluated or saved."""
        self._since, self._waited, self._bytes = time.perf_counter(), 0.0, 0

    def pause(self, began: float) -> None:
        """Take the time since `began` out of the reading."""
        self._since += time.perf_counter() - began

    def add(self, num_bytes: int, waited: float) -> None:
        """Note a step: its real bytes, over all processes, and the seconds its data was waited for."""
        self._bytes += num_bytes
        self._waited += waited

    @property
    def seconds(self) -> float:
        """Of training, all processes of this run that came before included."""
        return time.perf_counter() - self._began

    def read(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return figures of the steps since the last reading. `metrics` tells bytes_per_patch, if there are patches."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        found = {"seconds": self.seconds}
        if self._bytes:
            speed = self._bytes / elapsed
            found |= {"bytes_per_second": speed, "data_wait": self._waited / elapsed}
            if self.peak is not None:
                found["mfu"] = mfu(self.cost.per_byte(metrics.get("bytes_per_patch")), speed, self.peak)
        found |= peak_memory()
        self.restart()
        return found


def peak_memory() -> dict[str, float]:
    """Return the most bytes that a device of this process has held so far; empty where the platform does not tell."""
    stats: list[Any] = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return {"peak_memory_bytes": float(max(peaks))} if peaks else {}


@contextmanager
def traced(folder: Path, steps: tuple[int, int] | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call before each step: the profiler traces the steps first..last into `folder`."""
    block = ExitStack()

    def before(step: int) -> None:
        if steps is not None and step == steps[0]:
            block.enter_context(trace(folder))
        if steps is not None and step == steps[1] + 1:
            block.close()

    with block:
        yield before
