"""Boundaries of patches that a quantised entropy model moves."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import answer, make_reader
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import target_counts
from jaxblt.data.batch import Batch
from jaxblt.patching import PatcherConfig, make_patches
from jaxblt.training.state import ENTROPY
from jaxblt.training.step import Task, find_entropies


class Flips(NamedTuple):
    """Bytes at which one run ends a patch and the other does not.

    Attributes:
      flipped: such bytes.
      closed: bytes at which the first run ends a patch.
      bytes: all.
    """

    flipped: int
    closed: int
    bytes: int


def count_flips(run: TrainedRun, other: TrainedRun, sequences: Sequences) -> Flips:
    """Count the boundaries in which two runs of one patcher differ; none if they share the entropy model.

    Raises:
      ValueError: the run has no entropy model.
    """
    if ENTROPY not in run.frozen or run.patcher is None:
        raise ValueError(f"run {run.recipe.name!r} has no entropy model that cuts patches")
    found = [_closed(one, sequences) for one in (run, other)]
    flipped = closed = total = 0
    for (_, first, live), (_, second, _) in zip(*found, strict=True):
        flipped += int(((first != second) & live).sum())
        closed, total = closed + int((first & live).sum()), total + int(live.sum())
    return Flips(flipped, closed, total)


def _closed(run: TrainedRun, sequences: Sequences) -> Any:
    """Yield spans, and of a batch where patches end and which bytes are of a record."""
    reader = make_reader(run, window=None, batch_size=1)
    source = open_records(sequences, run.recipe.data)
    call = partial(_ends, reader.task, run.patcher)
    pairs = target_counts(source, run.recipe.data)
    return ((spans, *found) for spans, _, found in answer(reader, call, source, pairs))


@partial(jax.jit, static_argnums=(0, 1))
def _ends(
    task: Task, patcher: PatcherConfig, params: Any, frozen: Any, batch: Batch
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    entropies = find_entropies(task, frozen, batch)
    patches = make_patches(patcher, batch.inputs, segment_ids=batch.segment_ids, entropies=entropies)
    rows, length = batch.inputs.shape
    return patches.closed.reshape(rows, -1)[:, :length], jnp.asarray(batch.segment_ids) > 0
