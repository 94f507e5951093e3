"""The train step of a recipe on the recipe's mesh, timed."""

from functools import partial
from typing import Any

import jax

from experiments.benchmark.figures.programs import run_if_it_fits, time_on_devices
from jaxblt.training.flops import count_params
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.setup import recipe_step
from jaxblt.training.start.timed_step import prepare


def measured(recipe: Recipe, trials: int) -> dict[str, Any]:
    """Return seconds, bytes a second and planned memory of the step, or what the allocator said."""
    return run_if_it_fits(partial(_timed, recipe, trials))


def _timed(recipe: Recipe, trials: int) -> dict[str, Any]:
    sizes = recipe.mesh
    count = sizes.data * sizes.fsdp * sizes.seq * sizes.tensor
    mesh = sizes.build(jax.devices()[:count])
    with jax.set_mesh(mesh):
        ready = prepare(recipe, mesh)
        step: Any = recipe_step(ready.setup)
        compiled = step.lower(ready.state, ready.batch).compile()
        held = [ready.state]

        def run() -> Any:
            held[0], metrics = compiled(held[0], ready.batch)
            return metrics

        loss = float(run()["loss"])
        params, _ = count_params(ready.setup.whole)
        found = time_on_devices(compiled, run, trials)
    rate = ready.num_bytes / found["seconds"]["median"]
    return {"parameters": params, "first_loss": loss, "bytes_per_second": rate, **found}
