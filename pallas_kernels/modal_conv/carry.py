"""The carry from chunk to chunk: s_n = decay_n s_{n-1} + w_n."""

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

    Args:
      decays: what remains of s_{n-1}; decays[:, :, 0] is not read.
      written: w_n.
    """
    decays, written = vary_alike(decays, written)
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
