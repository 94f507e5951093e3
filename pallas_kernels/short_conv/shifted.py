"""A few taps as a sum of shifted products: no matrix, no transform."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.short_conv.gates import accumulator


def shift(x: Array, steps: int, fill: int = 0) -> Array:
    """x delayed by `steps` along its last axis; `fill` enters at the front."""
    pad = [(0, 0)] * (x.ndim - 1) + [(steps, 0)]
    return jnp.pad(x[..., : x.shape[-1] - steps], pad, constant_values=fill)


@jax.checkpoint
def shifted_products(
    u: Float[Array, "B D *N T"],
    taps: Float[Array, "D K"],
    documents: Int[Array, "B *N T"] | None = None,
) -> Float[Array, "B D *N T"]:
    """y_t = sum_k taps_k u_{t-k} over the last axis, within a document, in the accumulator's dtype.

    Rematerialised: backward would otherwise keep one shifted copy of u per tap.
    """
    wide = accumulator(u.dtype)
    u, taps = u.astype(wide), taps.astype(wide)
    y = jnp.zeros((), wide)
    for k in range(min(taps.shape[1], u.shape[-1])):
        term = taps[:, k].reshape(1, -1, *[1] * (u.ndim - 2)) * shift(u, k)
        if documents is not None and k:
            same = documents == shift(documents, k, fill=-1)
            term = jnp.where(same[:, None], term, jnp.zeros((), wide))
        y = term if k == 0 else y + term
    return y
