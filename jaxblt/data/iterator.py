"""Prefetching on top of Grain; its state is one integer."""

from __future__ import annotations

import sys
from typing import Any, Protocol, runtime_checkable

from jaxblt.data.batch import Batch


@runtime_checkable
class Batches(Protocol):
    """Batches by step, as a `Dataset` has them."""

    @property
    def num_batches(self) -> int | None:
        """Batches in all; None without end."""
        ...

    def batch(self, step: int) -> Batch:
        """Make the batch of a step."""
        ...


class BatchIterator:
    """Batches of a dataset in the order of their steps.

    Attributes:
      step: the step of the batch that `next` returns: the whole state.
    """

    def __init__(self, dataset: Batches, step: int, *, prefetch: int, workers: int):
        if step < 0 or prefetch < 0 or workers < 0:
            raise ValueError(
                f"step, prefetch and workers must be at least 0, got {step}, {prefetch} and {workers}"
            )
        self._dataset, self._prefetch, self._workers = dataset, prefetch, workers
        self._source: Any = None
        self.step = step

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        if self._source is None:
            self._source = self._open()
        batch = next(self._source)
        self.step += 1
        return batch

    def _open(self) -> Any:
        import grain  # takes a second, and only iterating needs it

        last = self._dataset.num_batches
        stop = sys.maxsize if last is None else max(last, self.step)
        steps = grain.MapDataset.range(self.step, stop).map(self._dataset.batch)
        in_process = min(self._prefetch, 1) if not self._workers else 1
        options = grain.ReadOptions(num_threads=in_process, prefetch_buffer_size=max(self._prefetch, 1))
        batches = steps.to_iter_dataset(options)
        if self._workers:
            _let_grain_read_its_flags()
            batches = batches.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self._workers, per_worker_buffer_size=max(self._prefetch, 1)
                )
            )
        return iter(batches)

    def get_state(self) -> dict[str, int]:
        """Return the state: {"step": the next step}."""
        return {"step": self.step}

    def set_state(self, state: dict[str, int]) -> None:
        """Go on from a state."""
        self.close()
        self.step = int(state["step"])

    def close(self) -> None:
        """End threads and worker processes; the iterator can be used again afterwards."""
        if self._source is not None:
            self._source.close()
            self._source = None


def _let_grain_read_its_flags() -> None:
    """Mark absl's flags as parsed: Grain's workers read them, which raises outside an absl app."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
