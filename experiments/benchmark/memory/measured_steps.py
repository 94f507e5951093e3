"""Measured memory of one model's train steps, in a process of its own, as JSON on the last line.

python -m experiments.benchmark.memory.measured_steps OPTIONS_AS_JSON
"""

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.benchmark.memory.memory_context import Name, model, step_recipe
from jaxblt.parallel import MeshConfig
from jaxblt.profiling import profile_memory
from jaxblt.profiling.plan import step_memory
from jaxblt.training.start.timed_step import prepare

STEPS = 3
"""Steps that are measured at each length."""


def measure_step(name: Name, length: int, **shape: int) -> dict[str, Any]:
    """Return the bytes that the compiler plans for a step beyond its arguments, and by how much the process grows."""
    mesh = MeshConfig(data=1).build(jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        ready = prepare(step_recipe(model(name, **shape), length, "float32"), mesh)
        step: Any = ready.step()
        compiled = step.lower(ready.state, ready.batch).compile()
        planned = step_memory(compiled, {"state": ready.state, "batch": ready.batch})
        # Take a first step unmeasured: it loads what later steps find loaded
        state, _ = jax.block_until_ready(compiled(ready.state, ready.batch))
        grown = []
        for _ in range(STEPS):
            forget_peak()
            with profile_memory() as memory:
                state, _ = jax.block_until_ready(compiled(state, ready.batch))
            grown.append(memory.host_peak - memory.host_before)
    return {
        "tokens": length,
        "arguments": sum(planned.arguments.values()),
        "planned": planned.temporaries + planned.results,
        # Take the largest: a step seems to need less where the last one's memory was freed late
        "measured": max(grown),
        "measured_of_each": grown,
    }


def forget_peak() -> None:
    """Give freed memory back to the kernel, and let the process's peak begin anew (Linux)."""
    time.sleep(0.5)  # threads may still free what the last step held
    # Trim the heap: without it a step fills what compiling left, and the process does not grow
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def main(name: Name, lengths: Sequence[int], shape: dict[str, int]) -> None:
    """Measure one model at each length, and print what was found."""
    print(json.dumps([measure_step(name, length, **shape) for length in lengths]))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
