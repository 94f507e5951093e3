"""The blocks of ranks with a number other than 0 in a tile of tokens."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from pallas_kernels.routed_lora.hopper import TILE


def code_of_tokens(code: Shaped[Array, "B C E"], chunk: int, length: int) -> Shaped[Array, "B T E"]:
    """Return the numbers of every token: those of its chunk."""
    return jnp.repeat(code, chunk, axis=1)[:, :length] if chunk > 1 else code


def active_blocks(code: Float[Array, "B C E"], length: int, *, chunk: int = 1) -> Bool[Array, "tiles E"]:
    """Mark blocks for which some token of a tile has a number other than 0.

    This is `active` of `routed_lora` for this code. A tile is 256 tokens in the order of rows, the last one perhaps not
    full: tile i has the tokens 256 i to 256 i + 255 of x.reshape(B T, K). It may have tokens of several rows.

    Args:
      code: as in `routed_lora`.
      length: T, the tokens of a row.
      chunk: tokens that share a code.
    """
    tokens = code_of_tokens(code != 0, chunk, length).reshape(-1, code.shape[-1])
    filled = jnp.pad(tokens, ((0, -tokens.shape[0] % TILE), (0, 0)))
    return jnp.any(filled.reshape(-1, TILE, code.shape[-1]), axis=1)


def masked(
    code: Float[Array, "B C E"], active: Bool[Array, "tiles E"], chunk: int, length: int
) -> Float[Array, "B T E"]:
    """Return the numbers of every token, 0 where the block is not active in its tile.

    Each has the gradient of its product. A 0 that the code has itself keeps its gradient: that of a choice that goes
    straight through is not lost.
    """
    tokens = code_of_tokens(code, chunk, length)
    kept = jnp.repeat(active, TILE, axis=0)[: tokens.shape[0] * length].reshape(tokens.shape)
    return tokens - lax.stop_gradient(jnp.where(kept, jnp.zeros((), code.dtype), tokens))
