"""The likeliest bytes at each place of records, beside the bytes that stand there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import BATCH_SIZE, Counts, read_targets, scoring_reader, target_logits
from jaxblt.data.batch import Batch
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.show import show
from jaxblt.training.step import Task
from jaxblt.validation import whole


@dataclass(frozen=True, eq=False)
class Ranks:
    """The predictions of a record's N bytes, and of EOS behind the last one, in nats.

    Attributes:
      nats: Float64[N + 1], the log-probability of each byte, and of EOS.
      top_ids: Int32[N + 1, K], the most probable ids at each place, best first; a byte's id is byte + 4, EOS is 2.
      top_nats: Float64[N + 1, K], their log-probabilities.
    """

    nats: np.ndarray
    top_ids: np.ndarray
    top_nats: np.ndarray

    __repr__ = show


def rank_bytes(
    run: TrainedRun,
    sequences: Sequences,
    *,
    top: int = 5,
    window: int | None = None,
    batch_size: int = BATCH_SIZE,
    as_trained: bool = True,
) -> Sequence[Ranks]:
    """Return the log-probability of each byte of each record, and of the most probable ids in its place.

    Records are read as `score` reads them. Every byte is ranked, whatever characters the run's data score.

    Args:
      run: trained to predict the next byte.
      sequences: as for `score`.
      top: ids to name at each place, 1..260.
      window: most positions of a row; None for the length of the run's training rows.
      batch_size: rows that are read at once.
      as_trained: records have the case of the run's data; False takes every byte as it is.

    Raises:
      ValueError: as of `score`; or `top` is out of range.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than these records ask for; see `Run.recalibrate`.
    """
    whole("top", top, least=1, most=VOCAB_SIZE)
    reader = scoring_reader(run, window=window, batch_size=batch_size, as_trained=as_trained)
    source = open_records(sequences, run.recipe.data, as_trained=as_trained)
    pairs = np.asarray(source.lengths, np.int64) + 1
    found = [
        Ranks(np.empty(count), np.empty((count, top), np.int32), np.empty((count, top)))
        for count in pairs.tolist()
    ]
    call = partial(_ranked, reader.task, top)
    for span, _, (nats, top_ids, top_nats) in read_targets(reader, call, source, pairs):
        ranks, own = found[span.document], slice(span.scored, span.stop)
        ranks.nats[own], ranks.top_ids[own], ranks.top_nats[own] = nats, top_ids, top_nats
    return found


@partial(jax.jit, static_argnums=(0, 1))
def _ranked(
    task: Task, top: int, params: Any, frozen: Any, batch: Batch
) -> tuple[tuple[jax.Array, ...], Counts]:
    """Return log p of every target, the `top` most probable ids and theirs."""
    logits, finite, counts = target_logits(task, params, frozen, batch)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32)[..., :VOCAB_SIZE], -1)
    # Pick a target from the same numbers as the likeliest ids: a client compares them to see what is greedy
    nats = jnp.take_along_axis(logprobs, batch.targets[..., None], -1)[..., 0]
    top_nats, top_ids = jax.lax.top_k(logprobs, top)
    return (nats if finite is None else jnp.where(finite, nats, jnp.nan), top_ids, top_nats), counts
