"""The states before each chunk: S_{n+1} = a_n S_n + U_n elementwise, one chunk after another."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient

UNROLL = 8
"""Chunks to a turn of the loop, which XLA makes one kernel of."""


def carry_states(
    decay: Float[Array, "N B H #K #G #V"],
    written: Float[Array, "N B H K G V"],
    start: Float[Array, "B H K G V"],
    dtype: Any,
) -> tuple[Float[Array, "N B H K G V"], Float[Array, "B H K G V"]]:
    """Return the state before each chunk, in `dtype`, and the wide one behind the last."""
    return _carry(*vary_alike(decay, written, start), dtype)


@partial(OwnGradient, nondiff_argnums=(3,))
def _carry(decay: Array, written: Array, start: Array, dtype: Any) -> tuple[Array, Array]:
    """Carry states over chunks.

    The gradient is the same recurrence from the end; XLA sums that of the decays over all chunks at once.
    """

    def step(state: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        return now[0] * state + now[1], state.astype(dtype)

    final, entering = lax.scan(step, start, (decay, written), unroll=UNROLL)
    return entering, final


def _carry_fwd(
    decay: Array, written: Array, start: Array, dtype: Any
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    found: Any = _carry(decay, written, start, dtype)
    entering, final = found
    return (entering, final), (decay, entering)


def _carry_bwd(
    dtype: Any, kept: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    (decay, entering), (dentering, dfinal) = kept, cotangents

    def step(behind: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        return now[0] * behind + now[1].astype(behind.dtype), behind

    dstart, dwritten = lax.scan(step, dfinal, (decay, dentering), reverse=True, unroll=UNROLL)
    shared = [axis for axis in range(decay.ndim) if decay.shape[axis] != dwritten.shape[axis]]
    ddecay = jnp.sum(entering.astype(dwritten.dtype) * dwritten, shared, keepdims=True)
    return ddecay, dwritten, dstart


_carry.defvjp(_carry_fwd, _carry_bwd)
