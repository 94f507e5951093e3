"""The sample of training data that thresholds and capacities are found on, with the entropies of its bytes."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.parallel.rules import replicated
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.setup import entropy_history, make_task
from jaxblt.training.state import ENTROPY, Frozen
from jaxblt.training.step import find_entropies

SAMPLE_BYTES = 1 << 18
"""Bytes of training data that a threshold and a capacity are calibrated on."""


def sample_batches(data: Dataset, recipe: Recipe) -> list[Batch]:
    """Sample training batches, the same in every process.

    Of endless, shuffled data these are the first of full length; of one pass in order they lie at equal distances.
    """
    config, data = data.config, replace(data, history=entropy_history(recipe))
    rows = -(-SAMPLE_BYTES // config.seq_len)
    rows = rows if data.num_rows is None else min(rows, data.num_rows)
    steps: Any = range(data.settled, data.settled + -(-rows // config.batch_size))
    if data.num_batches is not None:
        steps = np.unique(np.linspace(0, data.num_batches - 1, len(steps)).astype(int)).tolist()
    return [data.batch(step, slots=range(data.rows_at(step))) for step in steps]


class Sample:
    """Batches with their entropies, which a program computes that may compile earlier.

    Attributes:
      rows, length: of all batches together, and of the longest.
      place: of the arrays, whole on every device.
    """

    rows: int
    length: int
    place: NamedSharding
    _entropies: Any = None

    def __init__(
        self, batches: list[Batch], recipe: Recipe, mesh: Mesh, frozen: Mapping[str, Frozen]
    ) -> None:
        """Take batches of `recipe`'s data, and the entropy model of `frozen` unless they bring entropies."""
        self._batches, self._frozen, self.place = batches, frozen, replicated(mesh)
        self.rows = sum(batch.inputs.shape[0] for batch in batches)
        self.length = max(batch.inputs.shape[1] for batch in batches)
        if ENTROPY in frozen and batches[0].entropies is None:
            task = replace(make_task(recipe), packed=True)
            self._entropies = jax.jit(partial(find_entropies, task), out_shardings=self.place)

    def lower(self) -> list[Lowered]:
        """Lower the program of entropies, for batches of the first one's shape."""
        if self._entropies is None:
            return []
        return [self._entropies.lower(self._frozen, jax.device_put(self._batches[0], self.place))]

    def read(self) -> tuple[Any, Any, Any]:
        """Return ids, segments and entropies [rows, T]. They are put together on the host, where nothing compiles."""
        batches = self._batches
        if self._entropies is not None:
            batches = [replace(batch, entropies=self._found(batch)) for batch in batches]

        def stack(name: str) -> Any:
            rows = [getattr(batch, name) for batch in batches]
            if any(x is None for x in rows):
                return None
            padded = [np.pad(x, ((0, 0), (0, self.length - x.shape[1]))) for x in map(np.asarray, rows)]
            return jax.device_put(np.concatenate(padded), self.place)

        return stack("inputs"), stack("segment_ids"), stack("entropies")

    def _found(self, batch: Batch) -> np.ndarray:
        return np.asarray(self._entropies(self._frozen, jax.device_put(batch, self.place)))


def compile_side_by_side(programs: Iterable[Lowered], meanwhile: Callable[[], Any]) -> None:
    """Compile programs in threads, each as soon as it is lowered, while `meanwhile` runs in this one.

    Jitted functions that were lowered for these arguments take what is compiled here.
    """
    with ThreadPoolExecutor() as pool:
        compiling = [pool.submit(program.compile) for program in programs]
        meanwhile()
        for program in compiling:
            program.result()
