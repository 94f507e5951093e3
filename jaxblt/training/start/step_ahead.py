"""A train step that compiles while a run makes its first state."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import jax

from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.training.metrics import Metrics
from jaxblt.training.start.kept_step import KeptStep
from jaxblt.training.start.setup import Setup, entropy_history, recipe_step, to_devices
from jaxblt.training.start.startup import Startup
from jaxblt.training.state import TrainState
from pallas_kernels.runtime import record_choices


def op_choices(step: Callable[..., Any], *args: Any) -> list[str]:
    """Tell which implementation each op of a jitted `step` gets for such arguments, and why not a faster one."""
    with record_choices() as lines:
        step.trace(*args)  # pyright: ignore[reportFunctionMemberAccess]
    return lines


class StepAhead:
    """A train step, to be called as the jitted one once it is prepared.

    Attributes:
      choices: which implementation each op got, in lines.
      kept: what earlier processes left of it.
    """

    choices: list[str]
    kept: KeptStep
    _step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    _shapes: list[tuple[int, ...]]
    _compiled: Future[Callable[..., Any] | None] | None = None

    def __init__(self, data: Dataset, pool: Executor, startup: Startup) -> None:
        """Take batches for tracing from `data`; the pool's threads compile, and `startup` is told of stages."""
        self._data, self._pool, self._startup = data, pool, startup

    def prepare(self, setup: Setup, number: int) -> None:
        """Trace the step of this number and begin to compile it, unless that was done. The mesh is set.

        The jitted step takes the program that is lowered here: for equal shapes and places it is the same. Threads do
        not see the mesh, so they only compile. If an earlier process kept the step, nothing is traced.
        """
        if self._compiled is not None:
            return
        self._startup.done("set-up")
        step: Any = recipe_step(setup)
        rows = replace(self._data, history=entropy_history(setup.recipe)).batch(number)
        given = (setup.abstract, to_devices(rows, setup.mesh, setup.recipe.data.batch_size, setup.layout))
        self._step, self.kept = step, KeptStep.of(setup, given)
        self._shapes = _shapes(given[1])
        self.choices = self.kept.told("choices", lambda: op_choices(step, *given))
        if self.kept.is_there:
            self._compiled = self._pool.submit(self.kept.load)
        else:
            self._compiled = self._pool.submit(self._compile, step.lower(*given))
        self._startup.done("tracing")

    def _compile(self, lowered: Any) -> None:
        """Compile a program for the jitted step to find, and keep it."""
        self.kept.keep(lowered.compile())

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take a step, when the program is there; a batch of other shapes than the first is traced."""
        assert self._compiled is not None
        loaded = self._compiled.result()
        if loaded is None or _shapes(batch) != self._shapes:
            return self._step(state, batch)
        return loaded(state, batch)


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(batch)]
