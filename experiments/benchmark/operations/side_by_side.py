"""Training of one byte model from several seeds in one process, all by one compiled step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.start.setup import Setup
    from jaxblt.training.state import TrainState


@dataclass(frozen=True)
class Trained:
    """Models of one recipe that were trained side by side.

    Attributes:
      setup: that they share, of the first seed.
      states: of each seed.
      step_seconds: mean time of a step of one model, first steps and compilation not counted.
    """

    setup: "Setup"
    states: list["TrainState"]
    step_seconds: float


def train_seeds(recipe: "Recipe", seeds: Sequence[int]) -> Trained:
    """Train from each seed in turn, step by step, on one device; a folder is neither read nor written.

    Parameters and the order of rows differ by seed. The masks of dropout are the first seed's.

    Args:
      recipe: of a byte model.
      seeds: at least one.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.training.start.frozen import resolve
    from jaxblt.training.start.setup import init_params, make_setup, open_data, recipe_step, to_devices
    from jaxblt.training.start.startup import keep_compiled
    from jaxblt.training.state import start

    keep_compiled(recipe.train.compilation_cache)
    mesh = recipe.mesh.build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        data = [open_data(replace(recipe, data=replace(recipe.data, seed=seed)), mesh) for seed in seeds]
        recipe, frozen = resolve(recipe, data[0], mesh)
        setup = make_setup(recipe, mesh, frozen)

        def begin(seed: jax.Array) -> "TrainState":
            return start(nn.meta.unbox(init_params(setup.task, recipe.data, seed)), setup.optimizer, frozen)

        draw, program = jax.jit(begin, out_shardings=setup.shardings), recipe_step(setup)
        states, begun = [draw(jnp.uint32(seed)) for seed in seeds], 0.0
        for step in range(recipe.train.steps):
            for i, rows in enumerate(data):
                batch = to_devices(rows.batch(step), mesh, recipe.data.batch_size, setup.layout)
                states[i] = program(states[i], batch)[0]
            if step == 0:
                jax.block_until_ready(states)
                begun = time.perf_counter()
        jax.block_until_ready(states)
    taken = (time.perf_counter() - begun) / max(recipe.train.steps - 1, 1) / len(seeds)
    return Trained(setup, states, taken)
