"""The steps of 64 ranks that the Hopper kernels sum over in a tile of tokens, where blocks are not active."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.routed_lora.grid import Term
from pallas_kernels.routed_lora.hopper import STEP


class Steps(NamedTuple):
    """Lists of steps, one list for each tile of tokens and each sum.

    Attributes:
      order: the lists of a tile one behind the other, each with its steps first and room for all behind them; steps
        are counted from the first one of their sum.
      counts: how long each list is.
    """

    order: Int[Array, "tiles steps"]
    counts: Int[Array, "tiles sums"]


def active_steps(active: Bool[Array, "tiles E"], ranks: Sequence[int]) -> Bool[Array, "tiles steps"]:
    """Mark steps that have a rank of an active block.

    The ranks of sites lie side by side, filled up to whole steps.
    """
    blocks = active.shape[1]
    wide = jnp.concatenate([jnp.repeat(active, rank // blocks, axis=1) for rank in ranks], 1)
    wide = jnp.pad(wide, ((0, 0), (0, -wide.shape[1] % STEP)))
    return jnp.any(wide.reshape(active.shape[0], -1, STEP), axis=2)


def listed(steps: Bool[Array, "tiles steps"], terms: Sequence[Term]) -> Steps:
    """List the steps of each term that count, first to last."""
    parts = [steps[:, term.start // STEP : (term.start + term.size) // STEP] for term in terms]
    counts = [jnp.sum(part, 1, dtype=jnp.int32) for part in parts]
    return Steps(jnp.concatenate([_in_front(part) for part in parts], 1), jnp.stack(counts, 1))


def _in_front(part: Bool[Array, "tiles n"]) -> Int[Array, "tiles n"]:
    """Return the numbers of those that count, then zeros.

    They are compared by pairs, as a sort is a kernel of its own.
    """
    places = jnp.arange(part.shape[1], dtype=jnp.int32)
    before = jnp.sum(part[:, None] & (places[None, :] < places[:, None])[None], -1, dtype=jnp.int32)
    here = part[..., None] & (before[..., None] == places[None, None])
    return jnp.sum(jnp.where(here, places[None, :, None], 0), 1, dtype=jnp.int32)
