"""Peak memory of a block of code, on the devices and on the host."""

import resource
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

_INTERVAL_SECONDS = 0.005


@dataclass
class MemoryProfile:
    """The bytes that a `profile_memory` block used; filled in when the block ends.

    device_peak: most bytes in use on any one device during the block, with those of before.
    device_before: bytes in use on the fullest device when the block began.
    device_limit: what the allocator may use; None where it does not say (CPU).
    device_source: "allocator" when its own high-water mark rose in the block (exact, temporaries of compiled
        programs included), "sampled" when its current use was read every 5 ms (shorter peaks are missed: use a
        fresh process for an exact figure), "live arrays" when only the sizes of live JAX arrays were (CPU:
        temporaries inside a program are not seen).
    host_peak, host_before: resident bytes of this process, at most during the block and when it began.
    """

    device_peak: int = 0
    device_before: int = 0
    device_limit: int | None = None
    device_source: Literal["allocator", "sampled", "live arrays"] = "live arrays"
    host_peak: int = 0
    host_before: int = 0

    @property
    def efficiency(self) -> float | None:
        """Share of the device's memory that the peak filled; None where there is no limit."""
        return None if self.device_limit is None else self.device_peak / self.device_limit

    def __str__(self) -> str:
        share = "" if self.efficiency is None else f" ({self.efficiency:.0%} of the device)"
        return f"device {self.device_peak / 2**30:.3f} GiB{share}, host {self.host_peak / 2**30:.3f} GiB"


@contextmanager
def profile_memory() -> Iterator[MemoryProfile]:
    """Measure the block's peak memory:

        with profile_memory() as memory:
            jax.block_until_ready(step(state, batch))
        print(memory)

    Wait for results inside the block: work that runs after it is not seen.
    """
    profile = MemoryProfile(device_before=_device_bytes(), host_before=_resident_bytes())
    marks = _device_marks(), _host_mark()
    peaks = {"device": profile.device_before, "host": profile.host_before}
    stop = threading.Event()

    def sample() -> None:
        peaks["device"] = max(peaks["device"], _device_bytes())
        peaks["host"] = max(peaks["host"], _resident_bytes())

    def watch() -> None:
        while not stop.wait(_INTERVAL_SECONDS):
            sample()

    watcher = threading.Thread(target=watch, name="profile_memory", daemon=True)
    watcher.start()
    try:
        yield profile
    finally:
        sample()
        stop.set()
        watcher.join()
        _fill(profile, peaks, *marks)


def _fill(profile: MemoryProfile, peaks: dict[str, int], device_marks: list[int], host_mark: int) -> None:
    after = _device_marks()
    risen = [new for new, old in zip(after, device_marks, strict=True) if new > old]
    profile.device_peak = max([peaks["device"], *risen])
    if after:
        exact = bool(risen) and max(risen) >= peaks["device"]
        profile.device_source = "allocator" if exact else "sampled"
        profile.device_limit = min(s["bytes_limit"] for s in _allocator_stats() if "bytes_limit" in s)
    profile.host_peak = max(peaks["host"], _host_mark() if _host_mark() > host_mark else 0)


def _allocator_stats() -> list[dict[str, int]]:
    stats = [device.memory_stats() for device in jax.local_devices()]
    return [s for s in stats if s]


def _device_marks() -> list[int]:
    """Return every allocator's high-water mark since the process began; empty without any."""
    return [s["peak_bytes_in_use"] for s in _allocator_stats() if "peak_bytes_in_use" in s]


def _device_bytes() -> int:
    """Return the bytes in use now on the fullest local device."""
    stats = _allocator_stats()
    if stats:
        return max(s["bytes_in_use"] for s in stats)
    held: Counter[Any] = Counter()
    for array in jax.live_arrays():
        # Count from shapes: asking an array for its shards would make new live arrays.
        size = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
        held.update(dict.fromkeys(array.sharding.addressable_devices, size))
    return max(held.values(), default=0)


def _host_mark() -> int:
    """Return the most resident bytes of this process since it began."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident_bytes() -> int:
    """Return resident bytes now; where /proc is absent the high-water mark."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return _host_mark()
