"""Training of one recipe from several seeds in one process, all by one compiled step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.data import DocumentSource
    from jaxblt.data.dataset import Dataset
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.start.setup import Setup
    from jaxblt.training.state import TrainState

WATCHED = (
    *("bits_per_byte", "bytes_per_patch", "overflow", "router/cut_rate", "router/undecided"),
    *("level/overflow", "level/router/cut_rate", "level/router/undecided"),
)
"""The metrics of a step that are kept, where the model has them."""


@dataclass(frozen=True)
class Trained:
    """Models of one recipe that were trained side by side.

    Attributes:
      setup: that they share, of the first seed.
      states: of each seed.
      steps: that each of them took.
      step_seconds: mean time of a step of one model, first steps and compilation not counted.
      start_seconds: until all have taken their first step.
      curve: metrics now and then, each a list over seeds.
      before: what `look` found before the first step.
    """

    setup: "Setup"
    states: list["TrainState"]
    steps: int
    step_seconds: float
    start_seconds: float
    curve: list[dict[str, Any]]
    before: Any = None


def train_seeds(
    recipe: "Recipe",
    seeds: Sequence[int],
    *,
    every: int,
    seconds: float | None = None,
    source: "DocumentSource | None" = None,
    look: "Callable[[Setup, Sequence[TrainState]], Any] | None" = None,
) -> Trained:
    """Train from each seed in turn, step by step, on one device; a folder is neither read nor written.

    Parameters, the router's calibration and the order of rows differ by seed. The patcher's calibration and the masks
    of dropout are the first seed's.

    Args:
      recipe: its steps are the most, and the learning rate's horizon.
      seeds: at least one.
      every: steps between entries of the curve, for which the devices are waited for.
      seconds: of each model, after which training ends.
      source: documents instead of those that the recipe names.
      look: at the states before the first step.
    """
    import jax

    from jaxblt.training.start.setup import recipe_step, to_devices
    from jaxblt.training.start.startup import keep_compiled

    keep_compiled(recipe.train.compilation_cache)
    begun, mesh = time.perf_counter(), recipe.mesh.build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        setup, states, data = _start(recipe, seeds, mesh, source)
        before = None if look is None else look(setup, states)
        program, curve, step, elapsed = recipe_step(setup), [], 0, 0.0
        limit = float("inf") if seconds is None else seconds * len(seeds)
        first = start_seconds = 0.0
        while step < recipe.train.steps and elapsed < limit:
            metrics = []
            for i, rows in enumerate(data):
                batch = to_devices(rows.batch(step), mesh, recipe.data.batch_size, setup.layout)
                states[i], found = program(states[i], batch)
                metrics.append(found)
            step += 1
            if step == 1:
                jax.block_until_ready(states)
                first = time.perf_counter()
                start_seconds = first - begun
            elif step % every == 0 or step == recipe.train.steps:
                curve.append({"step": step, **_kept(metrics)})
                elapsed = time.perf_counter() - first
    taken = (time.perf_counter() - first) / max(step - 1, 1) / len(seeds)
    return Trained(setup, states, step, taken, start_seconds, curve, before)


def _start(
    recipe: "Recipe", seeds: Sequence[int], mesh: Any, source: Any
) -> tuple["Setup", list["TrainState"], list["Dataset"]]:
    """Return what the seeds share, and the state before step 0 and the rows of each."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.training.start.boundaries import with_boundaries
    from jaxblt.training.start.frozen import resolve
    from jaxblt.training.start.setup import entropy_history, init_params, make_setup, open_data
    from jaxblt.training.state import start

    opened = [
        open_data(replace(recipe, data=replace(recipe.data, seed=seed)), mesh, source=source)
        for seed in seeds
    ]
    recipe, frozen = resolve(recipe, opened[0], mesh)
    setup = make_setup(recipe, mesh, frozen)

    def begin(seed: Any, frozen: Any) -> Any:
        params = nn.meta.unbox(init_params(setup.task, recipe.data, seed))
        # Copy: a step donates its state, and the seeds would donate one buffer each
        return start(params, setup.optimizer, jax.tree.map(jnp.copy, frozen))

    drawn = jax.jit(begin, out_shardings=setup.shardings)
    states = []
    for seed in seeds:
        state = drawn(jnp.uint32(seed), frozen)
        params = with_boundaries(recipe, state.params, {}, frozen, opened[0], mesh)
        states.append(replace(state, params=params))
    return setup, states, [replace(data, history=entropy_history(recipe)) for data in opened]


def _kept(metrics: Sequence[Any]) -> dict[str, list[float]]:
    """Return the watched metrics by name, over seeds."""
    return {name: [float(found[name]) for found in metrics] for name in WATCHED if name in metrics[0]}
