"""A recipe's train step, ready to be timed, and its time and memory by remat."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxblt.data import DocumentSource
from jaxblt.models.remat import Remat
from jaxblt.profiling.plan import step_memory
from jaxblt.training.recipe import Recipe
from pallas_kernels.runtime import MIN_TRIALS, measure

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxblt.data import Batch
    from jaxblt.training.start.setup import Setup
    from jaxblt.training.state import Frozen, TrainState


@dataclass(frozen=True)
class Ready:
    """A setup, the state before step 0, and the first batch, on the devices."""

    setup: "Setup"
    state: "TrainState"
    batch: "Batch"

    @property
    def num_bytes(self) -> int:
        """Bytes of a step."""
        return self.batch.inputs.size

    def step(self) -> Any:
        """Return `(state, batch) -> (state, metrics)`, as `fit` runs it."""
        from jaxblt.training.start.setup import recipe_step

        return recipe_step(self.setup)


def prepare(
    recipe: Recipe,
    mesh: "Mesh",
    source: DocumentSource | None = None,
    frozen: "Mapping[str, Frozen] | None" = None,
) -> Ready:
    """Resolve the recipe on the first batches of its data and draw its parameters; call it with the mesh set.

    Routers are calibrated. A `frozen` entropy model takes the place of that of `entropy_run`.
    """
    from jaxblt.training.start.boundaries import with_boundaries
    from jaxblt.training.start.frozen import resolve
    from jaxblt.training.start.setup import init_state, make_setup, open_data, to_devices

    data = open_data(recipe, mesh, source=source)
    recipe, frozen = resolve(recipe, data, mesh, frozen)
    setup = make_setup(recipe, mesh, frozen)
    batch = to_devices(data.batch(0), mesh, recipe.data.batch_size, setup.layout)
    state = init_state(setup, frozen)
    params = with_boundaries(recipe, state.params, {}, frozen, data, mesh)
    return Ready(setup, replace(state, params=params), batch)


def time_steps(
    recipe: Recipe,
    mesh: "Mesh",
    *,
    remat: Sequence[Remat] = (),
    trials: int = MIN_TRIALS,
    source: DocumentSource | None = None,
) -> list[dict[str, Any]]:
    """Time a recipe's train step, by remat if asked, and say what memory it is planned to take.

    A trial is one step from the call until its results are there, on the run's first batch. The state goes from step to
    step, as in `fit`.

    Args:
      recipe: as `fit` takes it.
      mesh: of devices that are here.
      remat: policies to time instead of the recipe's; the first is what others are compared with.
      trials: steps that are timed, of each.
      source: documents to use instead of those that the recipe names.

    Returns:
      For each policy {"remat", "seconds": summary, "bytes_per_second", "planned_bytes"}, and from the second on
      "time_ratio" and "memory_ratio" to the first.

    Raises:
      ValueError: too few trials, or the recipe does not fit the mesh or its data.
    """
    from jaxblt.training.start.compile_ahead import with_remat

    recipes = {policy: replace(recipe, model=with_remat(recipe.model, policy)) for policy in remat}
    found = [
        {"remat": name, **_time_step(changed, mesh, trials, source)}
        for name, changed in (recipes or {"of the recipe": recipe}).items()
    ]
    first = found[0]
    for other in found[1:]:
        other["time_ratio"] = other["seconds"]["median"] / first["seconds"]["median"]
        other["memory_ratio"] = other["planned_bytes"] / first["planned_bytes"]
    return found


def _time_step(recipe: Recipe, mesh: "Mesh", trials: int, source: DocumentSource | None) -> dict[str, Any]:
    import jax

    with jax.set_mesh(mesh):
        ready = prepare(recipe, mesh, source)
        step: Any = ready.step()
        compiled = step.lower(ready.state, ready.batch).compile()
        parts = {"parameters": ready.state.params, "optimiser": ready.state.opt_state, "batch": ready.batch}
        planned, held, batch = step_memory(compiled, parts).total, [ready.state], ready.batch

        def run() -> Any:
            held[0], metrics = compiled(held[0], batch)
            return metrics

        timed = measure(run, name="train step", trials=trials, warmup=1, method="host").summary
    rate = batch.inputs.size / timed.median
    return {"seconds": asdict(timed), "bytes_per_second": rate, "planned_bytes": planned}
