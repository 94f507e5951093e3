"""A train step that compiles while a run makes its first state."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.training.log.report import op_choices
from jaxblt.training.metrics import Metrics
from jaxblt.training.start.setup import Setup, entropy_history, recipe_step, to_devices
from jaxblt.training.start.startup import Startup
from jaxblt.training.state import TrainState


class StepAhead:
    """A train step, to be called as the jitted one once it is prepared.

    Attributes:
      choices: which implementation each op got, in lines.
    """

    choices: list[str]
    _step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    _compiled: Future[Any] | None = None

    def __init__(self, data: Dataset, pool: Executor, startup: Startup) -> None:
        """Take batches for tracing from `data`; the pool's threads compile, and `startup` is told of stages."""
        self._data, self._pool, self._startup = data, pool, startup

    def prepare(self, setup: Setup, number: int) -> None:
        """Trace the step of this number and begin to compile it, unless that was done. The mesh is set.

        The jitted step takes the program that is lowered here: for equal shapes and places it is the same. Threads do
        not see the mesh, so they only compile.
        """
        if self._compiled is not None:
            return
        self._startup.done("set-up")
        step: Any = recipe_step(setup)
        rows = replace(self._data, history=entropy_history(setup.recipe)).batch(number)
        given = (setup.abstract, to_devices(rows, setup.mesh, setup.recipe.data.batch_size, setup.layout))
        self.choices = op_choices(step, *given)
        self._step, self._compiled = step, self._pool.submit(step.lower(*given).compile)
        self._startup.done("tracing")

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take a step, when the program is compiled."""
        assert self._compiled is not None
        self._compiled.result()
        return self._step(state, batch)
