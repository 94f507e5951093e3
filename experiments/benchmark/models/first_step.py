"""A recipe's train step, ready to be timed: what the benchmarks of a step share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxblt.data import DocumentSource
from jaxblt.training.recipe import Recipe

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxblt.data import Batch
    from jaxblt.training.start.setup import Setup
    from jaxblt.training.state import TrainState


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
        from jaxblt.training.step import make_train_step

        train = self.setup.recipe.train
        return make_train_step(
            self.setup.task,
            self.setup.optimizer,
            schedule=self.setup.schedule,
            accumulate=train.accumulate,
            seed=train.seed,
            shardings=self.setup.shardings,
        )


def prepare(recipe: Recipe, mesh: "Mesh", source: DocumentSource | None = None) -> Ready:
    """Resolve the recipe on the first batches of its data and draw its parameters; call it with the mesh set."""
    from jaxblt.training.start.frozen import resolve
    from jaxblt.training.start.setup import init_state, make_setup, open_data, to_devices

    data = open_data(recipe, mesh, source=source)
    recipe, frozen = resolve(recipe, data, mesh)
    setup = make_setup(recipe, mesh, frozen)
    batch = to_devices(data.batch(0), mesh, recipe.data.batch_size)
    return Ready(setup, init_state(setup, frozen), batch)
