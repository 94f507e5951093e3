"""Which bytes of a record an answer rests on: gradients times inputs, and integrated gradients, at the embeddings."""

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from jaxblt.answers.classify import class_number
from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import answer, make_reader
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import BATCH_SIZE, scoring_reader, target_counts
from jaxblt.answers.tables import write_tsv
from jaxblt.data.batch import Batch
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.sources.base import read_document
from jaxblt.models.embeddings import ByteEmbedding
from jaxblt.models.label_head import content
from jaxblt.models.pooling import pool
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.show import show
from jaxblt.training.metrics import cross_entropy
from jaxblt.training.step import Task, find_entropies, predict
from jaxblt.validation import whole

Method = Literal["gradient", "integrated"]


@dataclass(frozen=True, eq=False)
class Attributions:
    """What each byte adds to an answer F, in the order of the records.

    Attributes:
      names: of the records.
      sequences: their bytes, as the run read them.
      values: for each record Float64[L].
      answers: Float64[N], F of each record.
      baselines: Float64[N], F where each byte has the mean embedding of the record's bytes. Integrated gradients add
        up to the answer less the baseline, within the error of their steps.
    """

    names: tuple[str, ...]
    sequences: tuple[bytes, ...]
    values: tuple[np.ndarray, ...]
    answers: np.ndarray
    baselines: np.ndarray

    __repr__ = show

    def __len__(self) -> int:
        return len(self.names)

    def to_tsv(self, path: str | os.PathLike[str]) -> None:
        """Write columns name, position from 1, byte and attribution."""
        records = zip(self.names, self.sequences, self.values, strict=True)
        rows = (
            (name, place + 1, chr(sequence[place]), value)
            for name, sequence, values in records
            for place, value in enumerate(values.tolist())
        )
        write_tsv(path, ("name", "position", "byte", "attribution"), rows)


def attributions(
    run: TrainedRun,
    sequences: Sequences,
    *,
    method: Method = "gradient",
    steps: int = 32,
    label: str | None = None,
    batch_size: int = BATCH_SIZE,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Attributions:
    """Return what each byte's embedding adds to the answer F of its record.

    F is log p(record) of a run that predicts bytes, the log-odds of a class against all others, or a scaled number. Let
    e_t be the embedding of byte t, its n-grams included, and m the mean of e over the record. A "gradient" is
    e_t · ∂F/∂e_t (Shrikumar et al. 2017, 1704.02685). An "integrated" one (Sundararajan et al. 2017, 1703.01365) is the
    mean of (e_t - m) · ∂F/∂e_t on the way from m to e of all bytes at once. The way has `steps` equal pieces, and the
    gradient is taken at their middles. The way does not begin at 0, where norms make F jump.

    Patches stay as the record's bytes cut them. What a head's words say does not pass the embedding and is left out:
    `mutagenesis` counts it.

    Args:
      run: trained to predict the next byte, or fine-tuned on one class or number of each record.
      sequences: a list of bytes or text, a path, or a DocumentSource; see `open_records` for case.
      method: see there.
      steps: of an integral.
      label: of a run on classes, the class that is explained; by default what the run calls each record.
      batch_size: rows that are read at once.
      as_trained: case and scored characters are those of the run's data; False takes every byte as it is.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.

    Raises:
      ValueError: the run answers otherwise, an option is out of range, or a record is longer than a row.
    """
    whole("steps", steps, least=1)
    data = run.recipe.data
    if getattr(run.recipe.model, "strands", "one") == "both":
        raise ValueError(
            "the run reads both strands (model.strands = 'both'), and an attribution is of one reading: use mutagenesis"
        )
    options = {"window": None, "batch_size": batch_size, "as_trained": as_trained, "mesh": mesh}
    source = open_records(sequences, data, as_trained=as_trained)
    if isinstance(data, LabelledDataConfig):
        reader, chosen = make_reader(run, **options), class_number(data, label)
        pairs = np.asarray(source.lengths, np.int64) + 1
    else:
        reader, chosen = scoring_reader(run, **options), None
        pairs = target_counts(source, data)
    if pairs.max() > reader.window:
        i = int(pairs.argmax())
        raise ValueError(
            f"record {source.names[i]!r} has {int(source.lengths[i])} bytes, and rows have {reader.window} positions: "
            "an attribution is of a record in one row, so cut the record"
        )
    counted = tuple(np.flatnonzero(reader.letters.counted).tolist())
    asked = (reader.task, counted, chosen, steps if method == "integrated" else 0)
    found: list[Any] = [None] * len(source)
    for spans, _, results in answer(reader, partial(_attributed, *asked), source, pairs):
        for i, span in enumerate(spans):
            found[span.document] = [x[i] for x in results]
    records = [read_document(source, i) for i in range(len(source))]
    values = [np.zeros(len(record)) for record in records]
    for own, (gradient, _, _) in zip(values, found, strict=True):
        read = gradient[1 : 1 + len(own)]
        own[: len(read)] = read
    answers, baselines = (np.array([x[j] for x in found], np.float64) for j in (1, 2))
    return Attributions(tuple(source.names), tuple(records), tuple(values), answers, baselines)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _attributed(
    task: Task,
    counted: tuple[int, ...],
    chosen: int | None,
    steps: int,
    params: Any,
    frozen: Any,
    batch: Batch,
) -> tuple[Float[Array, "B T"], Float[Array, "B"], Float[Array, "B"]]:
    """Return attributions of all positions, the answers of rows, and those of their baselines."""
    batch = replace(batch, entropies=find_entropies(task, frozen, batch))
    own = content(batch.inputs, batch.segment_ids)
    is_counted = jnp.isin(batch.targets, jnp.asarray(counted)) & (batch.segment_ids > 0)

    def logits(factor: Float[Array, "B T"], begins_at_mean: bool) -> Any:
        with nn.intercept_methods(partial(_scale_embeddings, own, factor, begins_at_mean)):
            return predict(task, params, frozen, batch, {})[0]

    ones = jnp.ones(own.shape, jnp.float32)
    first = logits(ones, False)
    likeliest = jnp.argmax(first, -1) if chosen is None else jnp.full(len(first), chosen)

    def answers(said: Any) -> Float[Array, "B"]:
        if said.ndim == 3:
            return -jnp.sum(jnp.where(is_counted, cross_entropy(said, batch.targets), 0), 1)
        if said.shape[1] == 1:
            return said[:, 0]
        nats = jax.nn.log_softmax(said)[jnp.arange(len(said)), likeliest]
        return nats - jnp.log(-jnp.expm1(nats))

    slope = jax.grad(lambda factor: jnp.sum(answers(logits(factor, steps > 0))))
    if steps:
        middles = (jnp.arange(steps, dtype=jnp.float32) + 0.5) / steps
        values = jnp.mean(jax.lax.map(lambda middle: slope(middle * ones), middles), 0)
    else:
        values = slope(ones)
    return jnp.where(own, values, 0), answers(first), answers(logits(0 * ones, True))


def _scale_embeddings(
    own: Bool[Array, "B T"],
    factor: Float[Array, "B T"],
    begins_at_mean: bool,
    call: Any,
    args: Any,
    options: Any,
    context: nn.module.InterceptorContext,
) -> Any:
    """Call a module's method; embeddings of a record's own bytes become (1 - factor) m + factor e, with m their mean.

    m is 0 unless `begins_at_mean`.
    """
    found = call(*args, **options)
    if not (isinstance(context.module, ByteEmbedding) and context.method_name == "__call__"):
        return found
    x, state = found
    factor, kept = factor[..., None].astype(x.dtype), own[..., None]
    mean = pool(x, own, "mean")[:, None].astype(x.dtype) if begins_at_mean else jnp.zeros_like(x[:, :1])
    return jnp.where(kept, mean + factor * (x - mean), x), state
