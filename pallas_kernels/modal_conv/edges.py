"""The chunk of a row that the Hopper kernels leave to XLA, where T is no multiple of 64: see `_conv.flat_rows`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._conv.gates import add_skip
from pallas_kernels._conv.toeplitz import toeplitz
from pallas_kernels._hopper import CHUNK
from pallas_kernels.modal_conv.filter import modal_filter, powers

Modes = tuple[Array, Array, Array | None]
"""log_poles, residues and the bias, all fp32."""


def run_edges(
    u: Float[Array, "B D 64"],
    modes: Modes,
    *,
    reverse: bool,
    state: Float[Array, "B D M"] | None = None,
    lengths: Float[Array, "B D"] | None = None,
) -> tuple[Float[Array, "B D 64"], Float[Array, "B D M"]]:
    """Convolve one chunk for each row, and return the state that it leaves behind, too.

    Args:
      u: inputs, zero where they are not the row's: in its first chunk the first steps, against time, in its last
        chunk, the last.
      modes: see `Modes`.
      reverse: against time.
      state: before the first step, if there is one; in the direction of time only.
      lengths: the row's steps in this chunk, for the state.
    """
    log_poles, residues, _ = modes
    within, steps = within_chunks(modes).astype(u.dtype), jnp.arange(CHUNK)
    equation = "dij,bdi->bdj" if reverse else "dij,bdj->bdi"
    y = jnp.einsum(equation, within, u, preferred_element_type=jnp.float32)
    ages = powers(log_poles, steps if reverse else CHUNK - 1 - steps)
    left = jnp.einsum("dmj,bdj->bdm", ages, u.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    if state is None:
        return y, left
    assert lengths is not None
    assert not reverse
    lengths = lengths[..., None]
    since = jnp.maximum((steps - CHUNK + 1).astype(jnp.float32)[None, None] + lengths, 0)
    decays = jnp.exp(log_poles[None, :, :, None] * since[:, :, None])
    y += jnp.sum((residues[None] * state)[..., None] * decays, 2)
    return y, left + jnp.exp(log_poles[None] * lengths) * state


def within_chunks(modes: Modes) -> Float[Array, "D 64 64"]:
    """Return T with the bias on its diagonal."""
    log_poles, residues, bias = modes
    return toeplitz(add_skip(modal_filter(log_poles, residues, CHUNK), bias, 0), CHUNK, CHUNK, 0)
