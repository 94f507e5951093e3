"""The draws of a round: what the device tells of them, and the one table in which they come to the host."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.inference.engine.config import TOP

Table = Int[Array, "S W"]
"""The draws of each row as words of 32 bits."""


class Drawn(NamedTuple):
    """The draws of a round, whether each belongs to its row, and what the model predicted.

    The most probable ids come with their log-probabilities; entropies and log-probabilities are in nats. `ended` tells
    which rows drew EOS. `drafted` and `accepted` count bytes that were guessed, and guessed right.
    """

    ids: Int[Array | np.ndarray, "S T"]
    kept: Bool[Array | np.ndarray, "S T"]
    finite: Bool[Array | np.ndarray, "S T"]
    closed: Bool[Array | np.ndarray, "S T"]
    entropies: Float[Array | np.ndarray, "S T"]
    logprobs: Float[Array | np.ndarray, "S T"]
    top_ids: Int[Array | np.ndarray, "S T K"]
    top_logprobs: Float[Array | np.ndarray, "S T K"]
    ended: Bool[Array | np.ndarray, "S"]
    drafted: Int[Array | np.ndarray, "S"]
    accepted: Int[Array | np.ndarray, "S"]


def pack_draws(drawn: Drawn) -> Table:
    """Return draws as one table: eleven arrays would be eleven transfers."""

    def pack(array: Array) -> Int[Array, "S N"]:
        is_number = jnp.issubdtype(array.dtype, jnp.floating)
        words = jax.lax.bitcast_convert_type(array, jnp.int32) if is_number else array.astype(jnp.int32)
        return words.reshape(len(words), -1)

    return jnp.concatenate([pack(jnp.asarray(array)) for array in drawn], 1)


def blank_table(rows: int, steps: int) -> Table:
    """Return a table of that many steps that says nothing."""
    return jnp.zeros((rows, steps * (6 + 2 * TOP) + 3), jnp.int32)


def unpack_draws(table: Int[np.ndarray, "S W"]) -> Drawn:
    """Return the draws that `pack_draws` has packed."""
    steps = (table.shape[1] - 3) // (6 + 2 * TOP)
    parts = 4 * [("i4", steps)] + 2 * [("f4", steps)] + [("i4", (steps, TOP)), ("f4", (steps, TOP))]
    parts += 3 * [("i4", ())]
    layout = np.dtype([(name, *part) for name, part in zip(Drawn._fields, parts, strict=True)])
    rows = table.view(layout)[:, 0]
    drawn = Drawn(*(rows[name] for name in Drawn._fields))
    flags = {name: getattr(drawn, name) != 0 for name in ("kept", "finite", "closed", "ended")}
    return drawn._replace(**flags)


def predictions(
    logits: Float[Array, "... V"], ids: Int[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."], Int[Array, "... K"], Float[Array, "... K"]]:
    """Return entropies, log-probabilities of `ids`, and the most probable ids with theirs."""
    logprobs = jax.nn.log_softmax(logits[..., :VOCAB_SIZE], -1)
    entropies = -jnp.sum(jnp.where(logprobs > -jnp.inf, jnp.exp(logprobs) * logprobs, 0.0), -1)
    top, top_ids = jax.lax.top_k(logprobs, TOP)
    return entropies, jnp.take_along_axis(logprobs, ids[..., None], -1)[..., 0], top_ids, top
