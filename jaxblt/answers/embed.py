"""Hidden states of records: a vector a record, a byte or a patch."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import Reader, answer, make_reader
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import BATCH_SIZE
from jaxblt.data.batch import Batch
from jaxblt.data.letters import Letters
from jaxblt.data.rows import Span
from jaxblt.data.sources import DocumentSource
from jaxblt.data.vocab import BOS
from jaxblt.models.finite import explain_nonfinite
from jaxblt.models.hidden import Layer, find_layer, hidden_states, layers_of
from jaxblt.outputs import whole_file
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.patching.patches import Patches
from jaxblt.show import show
from jaxblt.training.state import whole_params
from jaxblt.training.step import Task, find_entropies

Pool = Literal["mean", "last", "per_byte", "per_patch"]
"""The states of a record that are returned: their mean, the last, or one a byte or a patch."""
POOLED = ("mean", "last")
"""A state a record."""


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Hidden states of records, in the order given.

    Attributes:
      names: of the records.
      lengths: Int64[N], bytes of each.
      arrays: for each record Float32[D] ("mean", "last"), [bytes, D] ("per_byte") or [patches, D] ("per_patch").
      patch_lengths: with "per_patch", for each record Int32[patches], bytes of its patches, which sum to its length.
      layer, pool: as they were asked for.
    """

    names: tuple[str, ...]
    lengths: np.ndarray
    arrays: tuple[np.ndarray, ...]
    patch_lengths: tuple[np.ndarray, ...] | None
    layer: int | Literal["final"]
    pool: Pool

    __repr__ = show

    def __len__(self) -> int:
        return len(self.names)

    def to_npz(self, path: str | os.PathLike[str]) -> None:
        """Write `names`, `lengths` and `states`.

        For bytes and patches also `offsets` and `patch_lengths`. `states` is Float32[N, D] for "mean" and "last".
        Otherwise the records' states lie one behind the other, and those of record i are `states[offsets[i] : offsets[i
        + 1]]`.
        """
        fields: dict[str, Any] = {"names": np.array(self.names), "lengths": self.lengths}
        if self.pool in POOLED:
            fields["states"] = np.stack(self.arrays)
        else:
            fields["states"] = np.concatenate(self.arrays)
            fields["offsets"] = np.cumsum([0, *(len(array) for array in self.arrays)])
        if self.patch_lengths is not None:
            fields["patch_lengths"] = np.concatenate(self.patch_lengths)
        with whole_file(path) as partial_path, open(partial_path, "wb") as file:
            np.savez(file, **fields)


def embed(
    run: TrainedRun,
    sequences: Sequences,
    *,
    layer: int | Literal["final"] | None = None,
    pool: Pool = "mean",
    window: int | None = None,
    batch_size: int = BATCH_SIZE,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Embeddings:
    """Return hidden states of each record.

    BOS and the record's bytes are read, and the states of BOS left out. Layer i is the residual stream behind block i.
    A BLT's blocks are those of its encoder, of its latent stack, whose states are of patches, and of its decoder.
    "final" is what the head reads logits off, behind its norm.

    A record is a document of its own and is read by the same program whatever stands beside it. Records longer than
    `window` are read as `jaxblt.answers.score` reads them; layers of patches take records of one row only.

    Patches are those that the record has in a row of its own. Its last patch ends with the record. BOS counts as a byte
    when patches are cut, but a patch that holds only BOS is left out.

    Records are read in the case of the run's data. With `scored="ACGT"` there, the mean is taken over those bytes.

    Args:
      run: trained with any objective.
      sequences: a list of bytes or text, a path, or a DocumentSource; see `open_records` for case and N.
      layer: number of a block, negative from the end, or "final". None is "final", and with "per_patch" the last block
        of the latent stack.
      pool: "mean" over bytes (over patches for a layer of patches); state of the "last" one; or all, "per_byte" or
        "per_patch".
      window: most positions of a row; None for the length of the run's training rows.
      batch_size: rows that are read at once.
      as_trained: case and scored characters are those of the run's data; False takes every byte as it is.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.

    Raises:
      ValueError: there is no such layer, or it has no states of that kind.
      ValueError: there is no record, an empty one, one too long for a layer of patches, or one without a byte to take
        the mean of.
      ValueError: a state is not finite (names the record).
    """
    if pool not in get_args(Pool):
        raise ValueError(f"pool must be one of {', '.join(map(repr, get_args(Pool)))}, got {pool!r}")
    options = {"as_trained": as_trained, "mesh": mesh}
    reader = make_reader(run, window=window, batch_size=batch_size, **options)
    source = open_records(sequences, run.recipe.data, as_trained=as_trained)
    number = default_layer(run.model, pool) if layer is None else layer
    place = find_layer(run.model, number)
    check_pool(place, number, pool)
    # Count one pair more than bytes: BOS is an input too
    pairs = np.asarray(source.lengths, np.int64) + 1
    if place.of_patches:
        _check_one_row(source, pairs, reader)
    arrays, patch_lengths = _collect(reader, source, pairs, place, pool)
    lengths = pairs - 1
    return Embeddings(tuple(source.names), lengths, arrays, patch_lengths, number, pool)


def default_layer(model: Any, pool: Pool) -> int | Literal["final"]:
    """Return the layer that a pool is of where none is named."""
    if pool != "per_patch":
        return "final"
    latent = [i for i, layer in enumerate(layers_of(model)) if layer.of_patches]
    if not latent:
        raise ValueError(
            f"pool='per_patch' needs a model with patches, got a {type(model).__name__}: use 'per_byte'"
        )
    return latent[-1]


def check_pool(layer: Layer, number: int | str, pool: Pool) -> None:
    """Raise ValueError if a layer of bytes is asked for patches, or the other way round."""
    kind = "patches" if layer.of_patches else "bytes"
    if (pool == "per_patch" and kind == "bytes") or (pool == "per_byte" and kind == "patches"):
        other = "per_byte" if kind == "bytes" else "per_patch"
        raise ValueError(
            f"pool={pool!r} does not go with layer {number!r}, whose states are of {kind}: use {other!r}, 'mean' or "
            "'last', or another layer"
        )


def _check_one_row(source: DocumentSource, pairs: np.ndarray, reader: Reader) -> None:
    long = np.flatnonzero(pairs > reader.window)
    if long.size:
        i = int(long[0])
        raise ValueError(
            f"record {source.names[i]!r} of {pairs[i] - 1} bytes is longer than a row of window = {reader.window} "
            f"positions, over which patches are read: give window={pairs[i]}, or a layer of bytes"
        )


def _collect(
    reader: Reader, source: DocumentSource, pairs: np.ndarray, layer: Layer, pool: Pool
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...] | None]:
    """Return every record's states, and with "per_patch" the lengths of its patches."""
    parts: list[list[np.ndarray]] = [[] for _ in range(len(source))]
    sizes: list[np.ndarray] = [np.zeros(0, np.int32)] * len(source)
    call = partial(_row_states, reader.task, layer, pool, letters=reader.letters)
    for spans, _, (states, counts, finite) in answer(reader, call, source, pairs):
        _check_finite(finite, spans, source, reader)
        if not layer.of_patches:
            counts = reader.placement.in_order(counts)
            states = states if pool in POOLED else reader.placement.in_order(states)
        for i, span in enumerate(spans):
            kept = counts[i] > 0
            parts[span.document].append(states[i] if pool in POOLED else states[i][kept])
            sizes[span.document] = np.append(sizes[span.document], counts[i][kept])
    if pool == "mean" and (bare := [i for i, size in enumerate(sizes) if not len(size)]):
        raise ValueError(
            f"record {source.names[bare[0]]!r} holds none of scored={reader.letters.scored!r}, the characters that the "
            "run learned: leave it out, or take every byte with as_trained=False (--no-as-trained)"
        )
    arrays = tuple(_joined(each, len(size), pool) for each, size in zip(parts, sizes, strict=True))
    return arrays, tuple(sizes) if pool == "per_patch" else None


def _joined(parts: list[np.ndarray], count: int, pool: Pool) -> np.ndarray:
    """Join the windows that a record was read in to its states."""
    if pool == "mean":
        return (np.sum(parts, 0, np.float64) / count).astype(np.float32)
    return parts[-1] if pool == "last" else np.concatenate(parts)


def _check_finite(
    finite: np.ndarray, spans: tuple[Span, ...], source: DocumentSource, reader: Reader
) -> None:
    if finite.all():
        return
    name = source.names[spans[int(np.argmin(finite))].document]
    raise ValueError(
        f"hidden states of record {name!r} are not finite; {explain_nonfinite(reader.named_params)}"
    )


def row_states(
    task: Task,
    layer: Layer,
    pool: Pool,
    params: Any,
    frozen: Any,
    batch: Batch,
    *,
    letters: Letters = Letters(),
) -> tuple[Float[Array, "B *S D"], Int[Array, "B S"], Bool[Array, "B"]]:
    """Return states in fp32, those of a row summed up or picked where they are to be pooled.

    Returns:
      States; the bytes of the record in each of them, 0 for one that does not count; and whether all were finite.
    """
    entropies = find_entropies(task, frozen, batch)
    states, patches = hidden_states(
        task.model,
        whole_params(params, frozen),
        layer,
        batch.inputs,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        entropies=entropies,
    )
    counts, places = _bytes_held(batch, patches if layer.of_patches else None), batch.positions
    if layer.of_patches:
        places = jnp.broadcast_to(jnp.arange(counts.shape[1], dtype=jnp.int32)[None], counts.shape)
    elif pool == "mean":
        counts = counts * jnp.asarray(letters.counted)[batch.inputs]
    live = counts > 0
    states = states.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(states) | ~live[..., None], (1, 2))
    if entropies is not None:
        # Look at entropies too: one of NaN cuts no patch, and the states would hide it.
        finite &= jnp.all(jnp.isfinite(entropies), 1)
    if pool == "last":
        last = jnp.argmax(jnp.where(live, places, -1), 1)
        states = jnp.take_along_axis(states, last[:, None, None], 1)[:, 0]
    elif pool == "mean":
        states = jnp.sum(jnp.where(live[..., None], states, 0.0), 1)
    return states, counts, finite


_row_states = partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="letters")(row_states)


def _bytes_held(batch: Batch, patches: Patches | None) -> Int[Array, "B S"]:
    """Count the bytes to be answered for in each state of a row, without BOS."""
    if patches is None:
        return batch.loss_mask.astype(jnp.int32) * (batch.inputs != BOS).astype(jnp.int32)
    lengths = patches.lengths.reshape(len(batch.inputs), -1)
    # Leave BOS out: it begins the first patch of a record of one row
    return lengths.at[:, 0].add(-1)
