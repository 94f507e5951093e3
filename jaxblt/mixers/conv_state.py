"""Streaming state of convolutions: the inputs that later outputs still need."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.base import Clock, Tokens, last_run, rows


@flax.struct.dataclass
class HyenaState:
    """State of a Hyena mixer.

    Attributes:
      clock: where each row stands.
      short: the last short_taps - 1 projected inputs of the row's document, oldest first; zero before its
        start.
      filters: one for each long convolution: modal states [B, D, M] in fp32, or past inputs [B, D, taps - 1].
      capacity: the most tokens of a document if an implicit filter was cut to fewer taps than it has; else
        None.
    """

    clock: Clock
    short: Float[Array, "B E S"]
    filters: tuple[Array, ...]
    capacity: int | None = flax.struct.field(pytree_node=False)


def continuing(tokens: Tokens) -> Bool[Array, "B"]:
    """Rows whose first token continues the state's document; elsewhere no output needs the old state."""
    return tokens.run[:, 0] == 0


def op_segments(tokens: Tokens) -> Int[Array, "B T"] | None:
    """Segment ids of a call's tokens for a convolution op: ±1 is the state's document; None if all is of one."""
    if tokens.whole:
        return None
    document = jnp.where(tokens.live, tokens.run + 1, 0)
    return jnp.where(tokens.content, document, -document)


def with_history(
    history: Float[Array, "B D S"], u: Float[Array, "B D T"], tokens: Tokens
) -> tuple[Float[Array, "B D S+T"], Int[Array, "B S+T"] | None]:
    """Past and new inputs in one array, and segment ids for both."""
    if not history.shape[-1]:
        return u, op_segments(tokens)
    kept = continuing(tokens)
    past = jnp.where(rows(kept, history), history, jnp.zeros((), history.dtype)).astype(u.dtype)
    joined = jnp.concatenate([past, u], axis=-1)
    ids = op_segments(tokens)
    if ids is None:
        return joined, None
    before = jnp.broadcast_to(kept.astype(jnp.int32)[:, None], (u.shape[0], history.shape[-1]))
    return joined, jnp.concatenate([before, ids], axis=1)


def push_history(
    history: Float[Array, "B D S"], u: Float[Array, "B D T"], tokens: Tokens
) -> Float[Array, "B D S"]:
    """The last S inputs of each row's last document, oldest first; rows without a token keep every bit."""
    size = history.shape[-1]
    if not size:
        return history
    count = jnp.sum(tokens.live, 1, dtype=jnp.int32)
    joined = jnp.concatenate([history, u.astype(history.dtype)], axis=-1)
    runs = jnp.concatenate([jnp.zeros((u.shape[0], size), jnp.int32), tokens.run], axis=1)
    latest = jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, size, axis=-1))
    same = latest(runs, count) == last_run(tokens)[:, None]
    return jnp.where(same[:, None], latest(joined, count), jnp.zeros((), history.dtype))


def empty_history(batch_size: int, dim: int, size: int, dtype: Any) -> Float[Array, "B D S"]:
    """No inputs yet."""
    return jnp.zeros((batch_size, dim, size), dtype)
