"""Log-likelihoods of versions of one record, each read from where the first of them departs from the record.

The bytes before are read once and kept as a model's streaming state. All rows of a call start from it.
"""

from functools import partial
from itertools import batched
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.answers.reading import SHORTEST, Reader
from jaxblt.data.vocab import PAD
from jaxblt.training.metrics import cross_entropy
from jaxblt.training.state import whole_params
from jaxblt.training.step import Task

PIECE = 1024
"""Positions of a row in one call; the rest of a row is read `SHORTEST` at a time."""


def can_continue(reader: Reader, pairs: int) -> bool:
    """Return whether a record is read in one row, of more than the shortest length, by a model that can go on in it."""
    if reader.task.patcher is not None or reader.placement.mesh is not None:
        return False
    if not SHORTEST < pairs <= reader.window:
        return False
    try:
        jax.eval_shape(partial(reader.task.model.init_state, 1, num_bytes=pairs))
    except ValueError:  # it sees the future, or would keep too much of the past
        return False
    return True


class Continued:
    """Reads versions of a record in the order of their first differences."""

    def __init__(self, reader: Reader, ids: Int[np.ndarray, "N"]) -> None:
        """Take the record's ids, from BOS to its last target."""
        self._reader, self._ids, self._at = reader, ids, 0
        self._state = reader.task.model.init_state(reader.batch_size, num_bytes=len(ids) - 1)
        self._sum, self._count = 0.0, 0

    def __call__(
        self, versions: Int[np.ndarray, "M N"]
    ) -> tuple[Float[np.ndarray, "M"], Int[np.ndarray, "M"]]:
        """Return nats of each version, and the number of targets that they sum.

        Raises:
          ValueError: a version departs from the record before one that was read earlier.
        """
        differs = (versions != self._ids).any(0)
        # Read the byte before the first difference anew: its prediction is scored against the difference
        start = int(np.argmax(differs)) - 1 if differs.any() else self._at
        if start < self._at:
            raise ValueError(
                f"a version departs at byte {start}, and {self._at} bytes were read: sort versions"
            )
        self._advance(start)
        found = [self._tails(np.stack(group)) for group in batched(versions, self._reader.batch_size)]
        sums, counts = (np.concatenate(each) for each in zip(*found, strict=True))
        return sums + self._sum, counts + self._count

    def _advance(self, stop: int) -> None:
        """Read the record up to `stop`, in every row."""
        while self._at < stop:
            end = min(self._at + SHORTEST, stop)
            rows = np.tile(self._ids[self._at : end + 1], (self._reader.batch_size, 1))
            (sums, counts), self._state = self._read(rows, SHORTEST, self._state)
            self._sum, self._count, self._at = self._sum + sums[0], self._count + int(counts[0]), end

    def _tails(self, rows: Int[np.ndarray, "M N"]) -> tuple[np.ndarray, np.ndarray]:
        """Return nats and numbers of the targets behind the state."""
        sums, counts = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
        filled = np.concatenate([rows, np.tile(rows[:1], (self._reader.batch_size - len(rows), 1))])
        at, end, state = self._at, rows.shape[1] - 1, self._state
        while at < end:
            size = PIECE if end - at >= PIECE else SHORTEST
            (more, new), state = self._read(filled[:, at : min(at + size, end) + 1], size, state)
            sums, counts, at = sums + more[: len(rows)], counts + new[: len(rows)], at + size
        return sums, counts

    def _read(self, ids: np.ndarray, size: int, state: Any) -> tuple[tuple[np.ndarray, np.ndarray], Any]:
        """Read all ids but the last, in rows of `size`; return sums and numbers of their targets, and the state."""
        reader, count = self._reader, ids.shape[1] - 1
        room = ((0, 0), (0, size - count))
        inputs = np.pad(ids[:, :-1], room, constant_values=PAD).astype(np.int32)
        targets = np.pad(ids[:, 1:], room, constant_values=PAD).astype(np.int32)
        segment_ids = np.broadcast_to((np.arange(size) < count).astype(np.int32), inputs.shape)
        nats, state = _nats(reader.task, reader.params, reader.frozen, inputs, targets, segment_ids, state)
        counted = reader.letters.counted[targets[:, :count]]
        own = np.asarray(nats, np.float64)[:, :count]
        return (np.where(counted, own, 0.0).sum(1), counted.sum(1)), state


@partial(jax.jit, static_argnums=0)
def _nats(
    task: Task,
    params: Any,
    frozen: Any,
    ids: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    state: Any,
) -> tuple[Float[Array, "B T"], Any]:
    """Return log p of every target, and the state behind the ids."""
    variables = {"params": whole_params(params, frozen)}
    logits, state = task.model.apply(variables, ids, state, segment_ids=segment_ids, method="stream")
    return -cross_entropy(logits, targets), state
