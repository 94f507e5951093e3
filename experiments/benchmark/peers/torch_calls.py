"""PyTorch as a peer: importing it, timing its calls, and figures shape by shape."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments.benchmark.figures.saved import save
from pallas_kernels.runtime import alone

TRIALS, WARMUP = 20, 5
FLUSH_BYTES = 2**28
"""Rewritten before each trial, so that nothing is in the cache."""


def named(wanted: Sequence[str], shapes: Iterable[Any]) -> list[Any]:
    """Return the shapes of these names.

    Raises:
      ValueError: there are none of some names.
    """
    known = {shape.name: shape for shape in shapes}
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(f"no shapes {', '.join(unknown)}: expected some of {', '.join(known)}")
    return [known[name] for name in wanted]


def import_torch() -> Any:
    """Import PyTorch.

    Raises:
      RuntimeError: it is not installed, or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise RuntimeError("the peer needs PyTorch: install torch on a machine with a GPU") from error
    if not torch.cuda.is_available():
        raise RuntimeError("the peer is timed on a GPU, and torch sees none here")
    return torch


def about(torch: Any) -> dict[str, Any]:
    """Return what figures of a peer say of where they were taken."""
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name()}


def by_shape(
    benchmark: str, out: str, shapes: Sequence[Any], measure: Callable[[Any, Any], Any], **more: Any
) -> dict[str, Any]:
    """Write `measure(torch, shape)` of each shape as `calls` to `out`, after each.

    Args:
      benchmark: its name.
      out: JSON file.
      shapes: with names.
      measure: gives what is said of a shape.
      more: other figures.
    """
    torch = import_torch()
    figures: dict[str, Any] = {**about(torch), **more, "calls": {}}
    for shape in shapes:
        figures["calls"][shape.name] = measure(torch, shape)
        torch.cuda.empty_cache()
        save(benchmark, out, figures)
    return figures


def milliseconds(torch: Any, call: Callable[[], None]) -> float:
    """Return the median time of a call between two events on the GPU."""
    with alone():
        return _median(torch, call)


def _median(torch: Any, call: Callable[[], None]) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(WARMUP):
        call()
    taken = []
    for _ in range(TRIALS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def unless_too_large(torch: Any, call: Callable[[], None]) -> float | str:
    """Return `milliseconds`, or why the call was not timed."""
    try:
        return milliseconds(torch, call)
    except torch.OutOfMemoryError as problem:
        torch.cuda.empty_cache()
        return f"not timed: {str(problem).splitlines()[0]}"
