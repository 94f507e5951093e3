"""The carry from chunk to chunk: s_n = decay_n s_{n-1} + w_n."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike

SEQUENTIAL = 8
"""Up to this many chunks are carried one after another, more by a parallel scan."""


def carry_states(
    decays: Float[Array, "#B D N M"], written: Float[Array, "B D N M"]
) -> Float[Array, "B D N M"]:
    """s_n for all n, with s_{-1} = 0, in the dtype given (fp32).

    The gradient is the same recurrence from the end, g_n = ds_n + decay_{n+1} g_{n+1}, with dw_n = g_n and
    ddecay_n = g_n s_{n-1}; the gradient of a parallel scan is never built.

    Args:
      decays: what remains of s_{n-1}; decays[:, :, 0] is not read.
      written: w_n.
    """
    return _carry(*vary_alike(decays, written))


def _states(decays: Array, written: Array) -> Array:
    if written.shape[2] <= SEQUENTIAL:
        return _one_by_one(decays, written)

    def join(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    return lax.associative_scan(join, (decays, written), axis=2)[1]


def _one_by_one(decays: Array, written: Array) -> Array:
    states = [written[:, :, 0]]
    for n in range(1, written.shape[2]):
        states.append(decays[:, :, n] * states[-1] + written[:, :, n])
    return jnp.stack(states, 2)


def _forward(decays: Array, written: Array) -> tuple[Array, tuple[Array, Array]]:
    states = _states(decays, written)
    return states, (decays, states)


def _backward(kept: tuple[Array, Array], dstates: Array) -> tuple[Array, Array]:
    decays, states = kept
    # Rolled, each decay stands where it is wanted, and the one that is not read where none is.
    ages = jnp.roll(jnp.flip(decays, 2), 1, 2)
    g = jnp.flip(_states(ages, jnp.flip(dstates, 2)), 2)
    # Without the barrier XLA, compiling for an H200, does the scans again inside of the sum over rows and chunks.
    states, g = lax.optimization_barrier((states, g))
    ddecays = g * jnp.pad(states[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    return ddecays if decays.shape == g.shape else ddecays.sum(0, keepdims=True), g


_carry = jax.custom_vjp(_states)
_carry.defvjp(_forward, _backward)
