"""Time and planned memory of one compiled program."""

from typing import Any


def time_program(call: Any, args: tuple[Any, ...], trials: int) -> tuple[dict[str, Any], Any]:
    """Seconds with their interval, and what the compiler planned in bytes; and what the call returns."""
    import jax

    from experiments.benchmark._schema import timed
    from jaxblt.profiling import measure

    compiled = call.lower(*args).compile()
    planned: Any = compiled.memory_analysis()
    found = timed(measure(lambda: jax.block_until_ready(compiled(*args)), trials=trials, method="host"))
    planned_bytes = {
        "temporary_bytes": planned.temp_size_in_bytes,
        "argument_bytes": planned.argument_size_in_bytes,
    }
    return found | planned_bytes, compiled(*args)
