"""A run's answers as StableHLO programs that run without jaxblt, for any number of records.

A program is made of one row, mapped over rows, so that the number of rows is left open. It takes parameters as
arguments. Ops choose their plain XLA versions on any device. Kernels (Mosaic, Triton, cuDNN) are custom calls that JAX
promises no stability of. A program that asks for one by name is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Float, Int, UInt8

from jaxblt.answers.embed import Pool, check_pool, default_layer, row_states
from jaxblt.answers.reading import make_reader
from jaxblt.answers.score import scoring_reader, target_nats
from jaxblt.data.batch import Batch
from jaxblt.data.letters import Letters
from jaxblt.data.vocab import BOS, EOS, PAD
from jaxblt.interchange.runs import FROZEN, MODEL, by_name
from jaxblt.models.hidden import find_layer
from jaxblt.training.state import Frozen
from jaxblt.training.stored.safe_files import one_line
from jaxblt.validation import whole
from pallas_kernels.runtime import compiling_for, record_choices

if TYPE_CHECKING:
    from jaxblt.run import Run

Platform = Literal["cpu", "cuda"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")

Answer = Callable[[Any, dict[str, Any], UInt8[Array, "L"], Int[Array, ""]], dict[str, Array]]
"""The answer of a program about one record: (params, frozen, bytes, length) -> arrays by name."""


@dataclass(frozen=True, eq=False)
class Made:
    """A program, what it is called with beside the records, and what to tell of it.

    Attributes:
      exported: of (arrays by name, bytes UInt8[rows, most_bytes], lengths Int32[rows]).
      arrays: the parameters by name.
      about: JSON object: the question, its options, names of the arguments in order, platforms, implementations of ops.
    """

    exported: export.Exported
    arrays: dict[str, Array]
    about: dict[str, Any]


def make_score_program(run: "Run", length: int, *, platforms: Sequence[Platform] = PLATFORMS) -> Made:
    """Make the program of `run.score` for records of one row.

    It returns `nats` Float32[rows, length], log p of every target in order, 0 for one that does not count and behind
    the last; `scored` Int32[rows], targets that count; and `refused` and `wanted` Int32[rows], patch boundaries that
    found no slot and that were asked for. Case and scored characters are those of the run's data.

    Args:
      run: trained to predict the next byte.
      length: positions of a row; where EOS is scored, one of them is its own.
      platforms: to lower for.

    Raises:
      ValueError: the run does not predict the next byte, `length` is below 2, or the program holds what cannot be kept.
    """
    whole("length", length, least=2)
    reader = scoring_reader(run, window=length, batch_size=1)
    eos = bool(getattr(run.recipe.data, "ends_with_eos", False))

    def answer(params: Any, frozen: Any, data: Any, size: Any) -> dict[str, Array]:
        batch = record_row(data, size, length, reader.letters, eos=eos, every=False)
        nats, (refused, total) = target_nats(reader.task, params, frozen, batch)
        counted = batch.loss_mask * jnp.asarray(reader.letters.counted)[batch.targets]
        found = {"nats": jnp.where(counted > 0, nats, 0.0)[0], "scored": jnp.sum(counted)}
        return {**found, "refused": refused, "wanted": total}

    letters = reader.letters
    about = {"answer": "score", "length": length, "most_bytes": length - eos, "scores_eos": eos}
    about |= {"upper": letters.upper, "scored": letters.scored}
    return _export(run, answer, about, platforms)


def make_embed_program(
    run: "Run",
    length: int,
    *,
    layer: int | Literal["final"] | None = None,
    pool: Pool = "mean",
    platforms: Sequence[Platform] = PLATFORMS,
) -> Made:
    """Make the program of `run.embed` for records of one row.

    It returns `states`, Float32[rows, D] for "mean" and "last" and [rows, S, D] for the others, and `held`
    Int32[rows, S], bytes of the record in each state. A state that holds none does not count.

    Args:
      run: trained with any objective.
      length: positions of a row; one of them is BOS.
      layer: as of `run.embed`.
      pool: as of `run.embed`.
      platforms: to lower for.

    Raises:
      ValueError: as of `run.embed`; `length` is below 2; or the program holds what cannot be kept.
    """
    if pool not in get_args(Pool):
        raise ValueError(f"pool must be one of {', '.join(map(repr, get_args(Pool)))}, got {pool!r}")
    whole("length", length, least=2)
    reader = make_reader(run, window=length, batch_size=1)
    number = default_layer(run.model, pool) if layer is None else layer
    place = find_layer(run.model, number)
    check_pool(place, number, pool)

    def answer(params: Any, frozen: Any, data: Any, size: Any) -> dict[str, Array]:
        batch = record_row(data, size, length, reader.letters, eos=False, every=True)
        letters = reader.letters
        states, held, finite = row_states(reader.task, place, pool, params, frozen, batch, letters=letters)
        # Leave the look at NaN to `Program`: entropies of NaN cut no patch, and states would hide it
        states = jnp.where(finite.reshape(-1, *(1,) * (states.ndim - 1)), states, jnp.nan)
        held = jnp.maximum(held, 0)
        if pool == "mean":
            states = states / jnp.maximum(jnp.sum(held > 0, 1), 1)[:, None].astype(jnp.float32)
        return {"states": states[0], "held": held[0]}

    about = {"answer": "embed", "length": length, "most_bytes": length - 1, "layer": number, "pool": pool}
    about |= {"upper": reader.letters.upper, "scored": reader.letters.scored}
    return _export(run, answer, about, platforms)


def record_row(
    data: UInt8[Array, "L"], size: Int[Array, ""], length: int, letters: Letters, *, eos: bool, every: bool
) -> Batch:
    """Return one record as the row that `jaxblt.answers` reads.

    It has BOS and the record's bytes, each with the next one as target.

    Args:
      data: the record's bytes, and anything behind them.
      size: bytes of the record.
      length: positions of the row.
      letters: in whose case the record is read.
      eos: EOS is the last target.
      every: the last byte is read as well, though nothing is predicted from it.
    """
    at = jnp.arange(length, dtype=jnp.int32)
    ids = jnp.full(length + 1, PAD, jnp.int32).at[: data.shape[0]].set(jnp.asarray(letters.ids)[data])
    stream = jnp.where(jnp.arange(length + 1) < size, ids, EOS if eos else PAD)
    pairs = size + (1 if eos or every else 0)
    # Leave a row without a record empty, even of BOS
    live = (at < pairs) & (size > 0)
    inputs = jnp.concatenate([jnp.full(1, BOS, jnp.int32), stream[: length - 1]])
    fields = {"inputs": jnp.where(live, inputs, PAD), "targets": jnp.where(live, stream[:length], PAD)}
    counted = live.astype(jnp.int32)
    fields |= {"segment_ids": counted, "loss_mask": counted, "positions": jnp.where(live, at, 0)}
    rows: dict[str, Any] = {name: array[None] for name, array in fields.items()}
    return Batch(**rows)


def _export(run: "Run", answer: Answer, about: dict[str, Any], platforms: Sequence[Platform]) -> Made:
    """Lower an answer for any number of rows."""
    if not platforms or set(platforms) - set(PLATFORMS):
        raise ValueError(f"platforms are {tuple(platforms)}, expected some of {PLATFORMS}")
    arrays, trees = _arguments(run)

    def program(
        arrays: dict[str, Array], data: UInt8[Array, "B L"], lengths: Int[Array, "B"]
    ) -> dict[str, Float[Array, "B ..."] | Int[Array, "B ..."]]:
        return jax.vmap(partial(answer, *trees(arrays)))(data, lengths)

    (rows,) = export.symbolic_shape("rows")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    records = jax.ShapeDtypeStruct((rows, about["most_bytes"]), jnp.uint8)
    sizes = jax.ShapeDtypeStruct((rows,), jnp.int32)
    try:
        # Take plain versions of ops on any machine: kernels take no open number of rows, and JAX keeps none of them
        # stable
        with compiling_for(jax.devices("cpu")[0]), record_choices() as choices:
            exported = export.export(jax.jit(program), platforms=platforms)(shapes, records, sizes)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"run {run.recipe.name!r} cannot be exported as StableHLO: {one_line(error)}; leave `implementation` of "
            "its mixers None, as a program holds the plain versions of ops alone"
        ) from error
    names, patcher = [*sorted(arrays), "bytes", "lengths"], run.patcher
    patches = None if patcher is None else {"capacity": patcher.slots, "block_size": patcher.block_size}
    about |= {"arguments": names, "platforms": [*platforms], "ops": choices, "patches": patches}
    return Made(exported, arrays, about)


def _arguments(run: "Run") -> tuple[dict[str, Array], Callable[[dict[str, Array]], tuple[Any, Any]]]:
    """Return all parameters of a run by name, and a function that makes trees of them again."""
    params = run.params
    trees: dict[str, Any] = {MODEL: params} | {
        f"{FROZEN}.{name}": tree.params for name, tree in run.frozen.items()
    }
    named = {prefix: by_name(tree, prefix) for prefix, tree in trees.items()}

    def restore(prefix: str, arrays: dict[str, Array]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(trees[prefix]), [arrays[n] for n in named[prefix]])

    def back(arrays: dict[str, Array]) -> tuple[Any, dict[str, Frozen]]:
        hashes = {name: tree.content_hash for name, tree in run.frozen.items()}
        frozen = {name: Frozen(restore(f"{FROZEN}.{name}", arrays), hashes[name]) for name in run.frozen}
        return restore(MODEL, arrays), frozen

    return {name: jnp.asarray(np.asarray(x)) for part in named.values() for name, x in part.items()}, back
