"""One row of the CPU table in a process of its own: python -m experiments.benchmark.models.cpu_row OPTIONS_AS_JSON."""

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import jax

import configs
from jaxblt.data import DocumentSource
from jaxblt.parallel import MeshConfig
from jaxblt.profiling import measure, profile_memory
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.timed_step import prepare


def measure_step(recipe: Recipe, *, trials: int = 20, source: DocumentSource | None = None) -> dict[str, Any]:
    """Time a recipe's train step, and measure this process's most memory until its second step.

    Each trial is one step of training, from the call until its results are there: the state goes from step to step
    and its memory is reused, as in `fit`. The batch is always the first.
    """
    mesh = MeshConfig(data=1).build(jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        with profile_memory() as memory:
            ready = prepare(recipe, mesh, source)
            step, state, batch = ready.step(), ready.state, ready.batch

            def advance() -> Any:
                nonlocal state
                state, metrics = step(state, batch)
                return state, metrics

            del ready
            jax.block_until_ready([advance()[1], advance()[1]])
        timed = measure(advance, name="train step", trials=trials, warmup=1, method="host")
    return {
        "seq_len": batch.inputs.shape[1],
        "batch_size": batch.inputs.shape[0],
        "step_seconds": asdict(timed.summary),
        "bytes_per_second": batch.inputs.size / timed.summary.median,
        "peak_resident_bytes": memory.host_peak,
        "resident_bytes_before": memory.host_before,
    }


def main(seq_len: int, batch_size: int, entropy_run: str, trials: int) -> None:
    """Measure the demo recipe at a length and print the row as JSON, on the last line."""
    recipe = configs.get("demo")
    data = replace(recipe.data, seq_len=seq_len, batch_size=batch_size)
    print(json.dumps(measure_step(replace(recipe, data=data, entropy_run=entropy_run), trials=trials)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
