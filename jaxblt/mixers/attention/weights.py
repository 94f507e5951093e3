"""The weights of attention as a table, for pictures; the operation itself never makes them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def weights_of_keys(
    attend: Callable[[Float[Array, "B T G K"]], Float[Array, "B T H K"]], v: Float[Array, "B T G K"]
) -> Float[Array, "B T H T"]:
    """Return the weight with which each query takes each key.

    The operation returns sums of values by weight. One-hot values therefore bring the weights of K keys a call,
    whatever the mask is.

    Args:
      attend: the operation of one call, of its values.
      v: the values of the call, which give shape and dtype.
    """
    _, length, _, width = v.shape
    places = jnp.arange(length)[:, None]

    def some(start: Array) -> Array:
        one_hot = places == start + jnp.arange(width)[None]
        return attend(jnp.broadcast_to(one_hot[None, :, None], v.shape).astype(v.dtype))

    found = jax.lax.map(some, jnp.arange(0, length, width))
    return jnp.moveaxis(found, 0, 3).reshape(*found.shape[1:4], -1)[..., :length].astype(jnp.float32)
