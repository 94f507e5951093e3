"""Log-likelihoods of records under a trained run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import Call, Reader, answer, make_reader
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.strands import check_strands
from jaxblt.answers.tables import write_tsv
from jaxblt.data.batch import Batch
from jaxblt.data.rows import Span, pair_counts
from jaxblt.data.sources import DocumentSource, ReverseComplement, document_ends
from jaxblt.data.task_data import RowsConfig
from jaxblt.models.finite import explain_nonfinite
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.patching import warn_overflow
from jaxblt.show import show
from jaxblt.training.metrics import cross_entropy
from jaxblt.training.objectives.objectives import NextByte
from jaxblt.training.step import Task, find_entropies, predict

BATCH_SIZE = 8
"""Rows of a program where the caller does not say."""

Counts = tuple[Any, Any]
"""Numbers of patch boundaries: refused, and asked for."""


@dataclass(frozen=True, eq=False)
class Scores:
    """A row a record, in the order given.

    Attributes:
      names: of the records.
      lengths: Int64[N], bytes of each.
      scored: Int64[N], targets that count: the bytes, and one more where EOS was scored.
      log_likelihood: Float64[N], nats: the sum of log p over the targets that count.
      bits_per_byte: Float64[N], -log_likelihood / (scored · ln 2); NaN for a record without a target that counts.
      per_byte: for each record nats of every target in order, NaN for one that does not count; None if they were not
        asked for.
    """

    names: tuple[str, ...]
    lengths: np.ndarray
    scored: np.ndarray
    log_likelihood: np.ndarray
    bits_per_byte: np.ndarray
    per_byte: tuple[np.ndarray, ...] | None = None

    __repr__ = show

    def __len__(self) -> int:
        return len(self.names)

    def to_tsv(self, path: str | os.PathLike[str]) -> None:
        """Write columns name, length, scored, log_likelihood, bits_per_byte and per_byte.

        Commas stand between the values of per_byte.
        """
        header = ["name", "length", "scored", "log_likelihood", "bits_per_byte"]
        columns = [self.names, *(getattr(self, name).tolist() for name in ("lengths", *header[2:]))]
        if self.per_byte is not None:
            header = [*header, "per_byte"]
            columns.append([",".join(f"{x:.9g}" for x in nats) for nats in self.per_byte])
        write_tsv(path, header, zip(*columns, strict=True))


def score(
    run: TrainedRun,
    sequences: Sequences,
    *,
    per_byte: bool = False,
    both_strands: bool = False,
    window: int | None = None,
    batch_size: int = BATCH_SIZE,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Scores:
    """Return each record's log-likelihood in nats: Σ_t log p(byte t | BOS, bytes before t).

    Every byte is scored once. EOS is scored behind the last byte on two conditions: the run's data ends documents with
    it, and the source says that a text ends there. `run.recipe.data.ends_with_eos` is True for text and False for
    FASTA, unless `eos` says otherwise.

    Records are read as the run's data: `soft_mask="upper"` raises them, with `scored="ACGT"` only those bytes count.

    A record is a document of its own, and its patches are cut by its own entropies. Beside other records, or in another
    order, it is read by the same program in a row of its own.

    Records longer than `window` are read in windows that overlap by about half. A byte beyond the first window sees the
    bytes of its own window only, about half a window or more.

    Args:
      run: trained to predict the next byte.
      sequences: a list of bytes or text, a path, or a DocumentSource; see `open_records` for case and N.
      per_byte: keep the nats of every target.
      both_strands: the mean over the record and its reverse complement, as sums and byte by byte. Byte t's nats are the
        mean of its own on the record and those of its complement on the other strand.
      window: most positions of a row; None for the length of the run's training rows.
      batch_size: rows that are read at once.
      as_trained: case and scored characters are those of the run's data; False takes every byte as it is.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.

    Raises:
      ValueError: the run does not predict the next byte.
      ValueError: there is no record, or an empty one, or no target counts.
      ValueError: a byte, or with both strands a scored character, has no complement that counts.
      ValueError: a log-likelihood is not finite (names record and byte).

    Warns:
      PatchOverflowWarning: blocks have fewer slots than these records ask for; see `Run.recalibrate`.
    """
    options = {"window": window, "batch_size": batch_size, "as_trained": as_trained, "mesh": mesh}
    reader = scoring_reader(run, **options)
    source = open_records(sequences, run.recipe.data, as_trained=as_trained)
    if both_strands:
        check_strands(source, reader.letters)
    pairs = target_counts(source, run.recipe.data)
    strands = [source, ReverseComplement(source)] if both_strands else [source]
    if per_byte:
        found = [_every_target(reader, strand, pairs) for strand in strands]
        lengths = np.asarray(source.lengths).tolist()
        nats = _mean_of_strands(found[0], found[1], lengths) if both_strands else found[0]
        sums, counts = np.array([np.nansum(x) for x in nats]), np.array([_count(x) for x in nats])
    else:
        nats, totals = None, [log_likelihoods(reader, strand, pairs) for strand in strands]
        sums, counts = np.mean([x for x, _ in totals], 0), totals[0][1]
    if not counts.any():
        raise ValueError(
            f"no byte of the records is one of scored={reader.letters.scored!r}, the characters that the run learned: "
            "score other records, or take every byte with as_trained=False (--no-as-trained)"
        )
    bits = -sums / np.where(counts, counts, np.nan) / np.log(2)
    sizes = np.asarray(source.lengths, np.int64)
    return Scores(tuple(source.names), sizes, counts, sums, bits, None if nats is None else tuple(nats))


def _count(nats: np.ndarray) -> int:
    return int(np.isfinite(nats).sum())


def scoring_reader(run: TrainedRun, **options: Any) -> Reader:
    """Return a reader of a run that predicts the next byte; options are those of `make_reader`.

    Raises:
      ValueError: it does not, or an option is out of range.
    """
    objective = run.recipe.objective
    if not isinstance(objective, NextByte):
        raise ValueError(
            f"run {run.recipe.name!r} was trained with objective {type(objective).__name__}, expected NextByte: only a "
            "model of the next byte has a log-likelihood"
        )
    return make_reader(run, **options)


def target_counts(source: DocumentSource, data: RowsConfig) -> np.ndarray:
    """Count targets of each record, Int64[N]: its bytes, and EOS.

    EOS counts where the record ends, if the run's data has it.
    """
    lengths = np.asarray(source.lengths, np.int64)
    return pair_counts(lengths, document_ends(source), eos=getattr(data, "ends_with_eos", False))


def log_likelihoods(
    reader: Reader, source: DocumentSource, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return nats of each record, Float64[N], and the number of targets they sum, Int64[N]."""
    sums, counts = np.zeros(len(source), np.float64), np.zeros(len(source), np.int64)
    for span, nats in _pieces(reader, source, pairs):
        sums[span.document] += np.nansum(nats)
        counts[span.document] += _count(nats)
    return sums, counts


def _every_target(reader: Reader, source: DocumentSource, pairs: np.ndarray) -> list[np.ndarray]:
    found = [np.empty(count, np.float64) for count in pairs.tolist()]
    for span, nats in _pieces(reader, source, pairs):
        found[span.document][span.scored : span.stop] = nats
    return found


def _mean_of_strands(
    forward: list[np.ndarray], reverse: list[np.ndarray], lengths: list[int]
) -> list[np.ndarray]:
    """Return the mean byte by byte in forward order; EOS, where it was scored, stays last."""
    turned = [np.append(r[:n][::-1], r[n:]) for r, n in zip(reverse, lengths, strict=True)]
    return [(f + r) / 2 for f, r in zip(forward, turned, strict=True)]


def _pieces(reader: Reader, source: DocumentSource, pairs: np.ndarray) -> Iterator[tuple[Span, np.ndarray]]:
    """Yield the targets that a span answers for, Float64 in nats, NaN where one does not count."""
    counted = reader.letters.counted

    def call(*given: Any) -> tuple[tuple[Any], Counts]:
        nats, counts = _target_nats(reader.task, *given)
        return (nats,), counts

    for span, ids, (nats,) in read_targets(reader, call, source, pairs):
        yield span, np.where(counted[ids], nats, np.nan)


def read_targets(
    reader: Reader, call: Call, source: DocumentSource, pairs: np.ndarray
) -> Iterator[tuple[Span, np.ndarray, tuple[np.ndarray, ...]]]:
    """Yield spans, the ids of the targets that each answers for, and what `call` says of these targets.

    Args:
      reader: see `make_reader`.
      call: returns arrays ([B, T, ...]) and boundaries refused and asked for; its first array, in nats, must be finite.
      source: the records.
      pairs: Int64[N], pairs to read of each.

    Raises:
      ValueError: a log-likelihood is not finite.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than these records ask for.
    """
    refused = wanted = 0.0
    for spans, batch, (arrays, counts) in answer(reader, call, source, pairs):
        refused, wanted = refused + float(counts[0]), wanted + float(counts[1])
        targets = np.asarray(batch.targets)
        ordered = [reader.placement.in_order(array) for array in arrays]
        for row, span in enumerate(spans):
            own = slice(span.scored - span.start, span.stop - span.start)
            nats, *others = (array[row][own] for array in ordered)
            nats = nats.astype(np.float64)
            _check_finite(nats, span, source, reader)
            yield span, targets[row][own], (nats, *others)
    patcher = reader.task.patcher
    if patcher is not None:
        warn_overflow(refused, wanted, capacity=patcher.slots, block_size=patcher.block_size)


def target_nats(task: Task, params: Any, frozen: Any, batch: Batch) -> tuple[Float[Array, "B T"], Counts]:
    """Return log p of every target, and boundaries refused and asked for."""
    logits, finite, counts = target_logits(task, params, frozen, batch)
    nats = -cross_entropy(logits, batch.targets)
    return nats if finite is None else jnp.where(finite, nats, jnp.nan), counts


_target_nats = partial(jax.jit, static_argnums=0)(target_nats)


def target_logits(
    task: Task, params: Any, frozen: Any, batch: Batch
) -> tuple[Float[Array, "B T V"], Bool[Array, "B T"] | None, Counts]:
    """Return the logits of every target, which entropies are finite, and boundaries refused and asked for.

    The second result shows an entropy of NaN: it cuts no patch, so logits stay finite. It is None for a model without
    entropies.
    """
    entropies = find_entropies(task, frozen, batch)
    logits, patches, _ = predict(task, params, frozen, replace(batch, entropies=entropies), {})
    finite = None if entropies is None else jnp.isfinite(entropies)
    if patches is None:
        return logits, finite, (jnp.int32(0), jnp.int32(0))
    refused = jnp.sum(patches.overflow)
    return logits, finite, (refused, refused + jnp.sum(patches.lengths > 0))


def _check_finite(nats: np.ndarray, span: Span, source: DocumentSource, reader: Reader) -> None:
    if np.isfinite(nats).all():
        return
    at = int(np.argmin(np.isfinite(nats)))
    raise ValueError(
        f"log-likelihood of record {source.names[span.document]!r} is {nats[at]} at byte {span.scored + at}; "
        f"{explain_nonfinite(reader.named_params)}"
    )
