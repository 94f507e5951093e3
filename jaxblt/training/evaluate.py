"""Loss over a whole split: Σ nats / Σ bytes, not a mean of means."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxblt.data.pipeline import Dataset
from jaxblt.data.sources import DocumentSource
from jaxblt.data.vocab import encode
from jaxblt.training.metrics import Metrics, bits
from jaxblt.training.setup import Setup, open_data, to_devices
from jaxblt.training.state import TrainState
from jaxblt.training.step import make_eval_step

IN_FLIGHT = 8
"""Batches handed to the devices before the oldest result is fetched."""

EvalStep = Callable[[TrainState, Any, Any], Metrics]


def target_ids(characters: str | None) -> tuple[int, ...] | None:
    """The ids of single-byte characters such as "ACGT"; None for None."""
    return None if characters is None else tuple(int(i) for i in encode(characters.encode()))


class Validation:
    """`state -> figures` of the validation split, which is opened when it is first asked for.

    Args:
      setup: of the run.
      source: documents to use instead of those that the recipe names.
    """

    def __init__(self, setup: Setup, source: DocumentSource | None = None) -> None:
        self.setup, self.source = setup, source
        self._data: Dataset | None = None
        self._step = make_eval_step(setup.eval_task, seed=setup.recipe.train.seed)

    def __call__(self, state: TrainState) -> dict[str, float]:
        recipe, mesh = self.setup.recipe, self.setup.mesh
        if self._data is None:
            self._data = open_data(recipe, mesh, split="validation", mode="eval", source=self.source)
        return evaluate(self._step, state, self._data, mesh, max_batches=recipe.train.eval_batches)


def evaluate(
    step: EvalStep, state: TrainState, data: Dataset, mesh: Any, *, max_batches: int | None = None
) -> dict[str, float]:
    """Scores a split.

    Args:
      step: from `make_eval_step`.
      state: parameters and frozen entropy model.
      data: in mode "eval", where every target is scored once.
      mesh: of all devices.
      max_batches: stop after so many.

    Returns:
      loss (nats per byte), bits_per_byte and bytes; the same with "target_" in front if the step has targets;
      bytes_per_patch and overflow if it has patches.

    Raises:
      ValueError: no byte was scored.
    """
    count = data.num_batches if max_batches is None else min(max_batches, data.num_batches or max_batches)
    totals: dict[str, float] = {}
    waiting: list[Metrics] = []
    batches = data.iterator()
    for index, batch in enumerate(itertools.islice(batches, count)):
        on_devices = to_devices(batch, mesh, data.config.batch_size)
        waiting.append(step(state, on_devices, np.int32(index)))
        if len(waiting) >= IN_FLIGHT:
            _add(totals, waiting.pop(0))
    batches.close()
    for sums in waiting:
        _add(totals, sums)
    return summarise(totals)


def _add(totals: dict[str, float], sums: Metrics) -> None:
    """Adds up in Python's floats: fp32 would lose single bytes beyond 16 million."""
    for name, value in jax.device_get(sums).items():
        totals[name] = totals.get(name, 0.0) + float(value)


def summarise(totals: dict[str, float]) -> dict[str, float]:
    """Sums over a split as figures per byte; see `evaluate`."""
    found: dict[str, float] = {}
    for prefix in ("", "target_"):
        if f"{prefix}nll" not in totals:
            continue
        if totals[f"{prefix}bytes"] == 0:
            raise ValueError(
                f"the split holds no {prefix or 'scored '}byte to score: check the data and its `scored`"
            )
        loss = totals[f"{prefix}nll"] / totals[f"{prefix}bytes"]
        found |= {
            f"{prefix}loss": loss,
            f"{prefix}bits_per_byte": bits(loss),
            f"{prefix}bytes": totals[f"{prefix}bytes"],
        }
    if "patches" in totals:
        found["bytes_per_patch"] = totals["patched_bytes"] / max(totals["patches"], 1.0)
        found["overflow"] = totals["refused"] / max(totals["patches"] + totals["refused"], 1.0)
    return found
