"""The states before each chunk and the values that each chunk writes, one chunk after another.

D_n = U_n - W_n S_n,    S_{n+1} = a_n S_n + K_n^T D_n
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._linear_state.products import multiply
from pallas_kernels._own_gradient import OwnGradient


def carry_states(
    decay: Float[Array, "N B J G"],
    reading: Float[Array, "N B J G C K"],
    offered: Float[Array, "N B J G C V"],
    writing: Float[Array, "N B J G C K"],
    start: Float[Array, "B J G K V"],
    dtype: Any,
) -> tuple[Float[Array, "N B J G K V"], Float[Array, "N B J G C V"], Float[Array, "B J G K V"]]:
    """Return states S before chunks, values D written, and the state behind the last chunk.

    S and D are in `dtype`.

    Args:
      decay: a, of a whole chunk.
      reading: W.
      offered: U.
      writing: K, keys with the decay from each step to the chunk's end.
      start: the first S.
      dtype: of the products' operands; S itself is carried wide.
    """
    return _carry(*vary_alike(decay, reading, offered, writing, start), dtype)


@partial(OwnGradient, nondiff_argnums=(5,))
def _carry(
    decay: Array, reading: Array, offered: Array, writing: Array, start: Array, dtype: Any
) -> tuple[Array, Array, Array]:
    """Carry states over chunks.

    The gradient is a loop with two products a chunk as well; XLA multiplies the rest for all chunks at once.
    """

    def step(state: Array, now: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        decay, reading, offered, writing = now
        narrow = state.astype(dtype)
        new = offered - multiply("bjgck,bjgkv->bjgcv", reading, narrow)
        added = multiply("bjgck,bjgcv->bjgkv", writing, new.astype(dtype))
        state = decay[..., None, None] * state + added
        return state, (narrow, new)

    chunks = (decay, reading.astype(dtype), offered, writing.astype(dtype))
    final, (entering, new) = lax.scan(step, start, chunks)
    return entering, new, final


def _carry_fwd(
    decay: Array, reading: Array, offered: Array, writing: Array, start: Array, dtype: Any
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    found: Any = _carry(decay, reading, offered, writing, start, dtype)
    entering, new, final = found
    narrow = (reading.astype(dtype), writing.astype(dtype), entering, new.astype(dtype))
    return (entering, new, final), (decay, *narrow)


def _carry_bwd(
    dtype: Any, kept: tuple[Array, ...], cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array, Array, Array]:
    (decay, reading, writing, entering, new), (dentering, dnew, dfinal) = kept, cotangents

    def step(behind: Array, now: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        decay, reading, writing, dentering, dnew = now
        narrow, wide = behind.astype(dtype), behind.dtype
        dnew = dnew + multiply("bjgck,bjgkv->bjgcv", writing, narrow)
        kept = decay[..., None, None] * behind + dentering.astype(wide)
        return kept - multiply("bjgck,bjgcv->bjgkv", reading, dnew.astype(dtype)), (narrow, dnew)

    chunks = (decay, reading, writing, dentering, dnew)
    dstart, (behind, doffered) = lax.scan(step, dfinal, chunks, reverse=True)
    wide = dstart.dtype
    ddecay = jnp.sum(entering.astype(wide) * behind.astype(wide), (-2, -1))
    dreading = -multiply("nbjgcv,nbjgkv->nbjgck", doffered.astype(dtype), entering)
    dwriting = multiply("nbjgcv,nbjgkv->nbjgck", new, behind)
    return ddecay, dreading, doffered, dwriting, dstart


_carry.defvjp(_carry_fwd, _carry_bwd)
