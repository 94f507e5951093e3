"""Time and planned memory of compiled programs, and of those that run out of memory."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax

from experiments.benchmark.figures.saved import timed
from jaxblt.profiling import measure
from jaxblt.training.log.meter import peak_memory
from pallas_kernels.runtime import alone

LONG = 4.0
"""Seconds that a call may take; of longer ones only three are timed."""

SINGLY = {"xla_gpu_enable_command_buffer": ""}
"""Options of the compiler that launch kernels one by one: a trace does not tell the kernels of a command buffer."""


def planned_bytes(program: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Return bytes of arguments, temporaries and results, as the compiler lays them out.

    Args:
      program: a function, or a compiled one, which needs no `args`.
      args: of the program.
    """
    is_compiled = isinstance(program, jax.stages.Compiled)
    planned: Any = (program if is_compiled else jax.jit(program).lower(*args).compile()).memory_analysis()
    return {
        "arguments": planned.argument_size_in_bytes,
        "temporaries": planned.temp_size_in_bytes,
        "results": planned.output_size_in_bytes,
    }


def time_on_devices(compiled: Any, call: Callable[[], Any], trials: int) -> dict[str, Any]:
    """Return bytes that the compiler planned for a device, seconds a call, and the allocator's peak, if it tells one.

    The peak is of the process so far: this program's only where it is the largest that has run. Of calls that take many
    seconds three are timed, and their range is told instead of an interval.
    """
    planned = sum(planned_bytes(compiled).values()) - compiled.memory_analysis().alias_size_in_bytes
    with alone():
        seconds = _seconds(call)
        taken = (
            _thrice(call) if seconds > LONG else timed(measure(call, trials=trials, warmup=1, method="calls"))
        )
    return {"planned_bytes": int(planned), **peak_memory(), "seconds": taken}


def _thrice(call: Callable[[], Any]) -> dict[str, Any]:
    seconds = [_seconds(call) for _ in range(3)]
    return {
        "median": median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "trials": 3,
        "method": "calls",
    }


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


def run_if_it_fits(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `call` returns, or what the allocator said."""
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"out_of_memory": str(error).splitlines()[0]}


def ratio(one: dict[str, Any], many: dict[str, Any]) -> float | None:
    """Return median seconds of one over those of the other; None where either ran out of memory."""
    if "seconds" not in one or "seconds" not in many:
        return None
    return one["seconds"]["median"] / many["seconds"]["median"]
