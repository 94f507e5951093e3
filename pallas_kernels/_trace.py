"""Device time from the profiler's trace: what ran on the device, when, and for which call."""

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Trace = Any  # jax.profiler.ProfileData, which has no type that checkers know
_WINDOW = "measured_call"
_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class DeviceTime:
    """One call on the device, in seconds.

    busy: union of the intervals in which it ran something.
    span: from the start of the first of them to the end of the last, the gaps included.
    """

    busy: float
    span: float


def profile_calls(calls: Sequence[Callable[[], None]]) -> list[DeviceTime]:
    """Return each call's device time, in order; each call must wait for its own completion.

    Raises:
      RuntimeError: the trace holds no device event for some call.
    """
    flush = _cache_flush()
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for call in calls:
                flush()
                with jax.profiler.TraceAnnotation(_WINDOW):
                    call()
        return _device_times(read_trace(folder), len(calls))


def _cache_flush() -> Callable[[], None]:
    """Return a function that rewrites a buffer larger than a GPU's cache.

    On CPU it does nothing.
    """
    if jax.default_backend() == "cpu":
        return lambda: None
    buffer = jnp.ones(_FLUSH_BYTES // 4, jnp.float32)
    rewrite = jax.jit(lambda x: x + 1)
    return lambda: jax.block_until_ready(rewrite(buffer))


def read_trace(folder: str | Path) -> Trace:
    """Read the newest trace under a folder that `jax.profiler.trace` wrote.

    Raises:
      FileNotFoundError: there is none.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"no *.xplane.pb under {folder}: did the block inside jax.profiler.trace finish?"
        )
    return jax.profiler.ProfileData.from_file(str(files[-1]))


def device_events(data: Trace) -> Iterator[tuple[str, str, float, float]]:
    """Yield (device, operation, start, end) in nanoseconds of all that ran on a device.

    On a GPU these are kernels and copies on its streams; on CPU, XLA's operations.
    """
    for device, event in _events(data):
        yield device, event.name, event.start_ns, event.start_ns + event.duration_ns


def device_instructions(data: Trace) -> Iterator[tuple[str, str, float]]:
    """Yield (program, instruction, nanoseconds) of all that ran on a device.

    Names are those of the compiled program; of what belongs to none, "" and the event's name.
    """
    for _, event in _events(data):
        found = _origin(event)
        yield found.get("hlo_module", ""), found.get("hlo_op", str(event.name)), event.duration_ns


def _events(data: Trace) -> Iterator[tuple[str, Any]]:
    """Yield (device, event) of all that ran on a device."""
    planes = list(data.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if gpus or "hlo_op" in _origin(event):
                    yield plane.name, event


def _origin(event: Any) -> dict[str, str]:
    """Return which instruction of which of XLA's programs an event ran; nothing if none."""
    with warnings.catch_warnings():  # the first look at `stats` warns of its type's missing __module__
        warnings.simplefilter("ignore", DeprecationWarning)
        return {name: str(value) for name, value in event.stats if name in ("hlo_module", "hlo_op")}


def _device_times(data: Trace, count: int) -> list[DeviceTime]:
    """Return the device time of each call, on the slowest device where there are several."""
    windows = _windows(data)
    starts = np.array([start for start, _ in windows])
    busy: list[dict[str, list[tuple[float, float]]]] = [{} for _ in windows]
    for device, _, start, end in device_events(data):
        index = int(np.searchsorted(starts, start, side="right")) - 1
        if index >= 0 and start <= windows[index][1]:
            busy[index].setdefault(device, []).append((start, end))
    if len(windows) != count or not all(busy):
        raise RuntimeError(
            f"the profiler saw {len(windows)} of {count} calls, {sum(map(bool, busy))} with device work; "
            "is another profile running, or CUPTI missing? method='slope' needs no profiler"
        )
    return [_slowest(list(devices.values())) for devices in busy]


def _slowest(devices: list[list[tuple[float, float]]]) -> DeviceTime:
    busy = max(union_length(spans) for spans in devices)
    span = max(max(end for _, end in spans) - min(start for start, _ in spans) for spans in devices)
    return DeviceTime(busy * 1e-9, span * 1e-9)


def _windows(data: Trace) -> list[tuple[float, float]]:
    return sorted(
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if event.name == _WINDOW
    )


def union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
