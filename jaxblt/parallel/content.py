"""Content-first order of rows of one document: kernels take the content as a prefix of known length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from pallas_kernels.runtime import OwnGradient, has_reference_ops


class ContentFirst(NamedTuple):
    """An order of each row's tokens with holes and padding last, its inverse, and how many tokens come before them."""

    order: Int[Array, "B T"]
    back: Int[Array, "B T"]
    lengths: Int[Array, "B"]

    def sort(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Return x with its content first."""
        return _take(x, self.order, self.back)

    def restore(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Undo `sort`."""
        return _take(x, self.back, self.order)


def content_first(segment_ids: Int[Array, "B T"]) -> ContentFirst:
    """Return the order with tokens, of segment ids > 0, first.

    Tokens stay in their order.
    """
    order = jnp.argsort(segment_ids <= 0, axis=1, stable=True).astype(jnp.int32)
    back = jnp.argsort(order, axis=1).astype(jnp.int32)
    return ContentFirst(order, back, jnp.sum(segment_ids > 0, 1, dtype=jnp.int32))


def backwards(x: Shaped[Array, "B T ..."], lengths: Int[Array, "B"]) -> Shaped[Array, "B T ..."]:
    """Return x with the first lengths[b] tokens of row b in reverse order: it undoes itself."""
    place, ends = jnp.arange(x.shape[1], dtype=jnp.int32)[None], lengths[:, None]
    order = jnp.where(place < ends, ends - 1 - place, place)
    return _take(x, order, order)


def _take(
    x: Shaped[Array, "B T ..."], order: Int[Array, "B T"], back: Int[Array, "B T"]
) -> Shaped[Array, "B T ..."]:
    """Take x in a new order whose inverse is `back`.

    The gradient is a gather too, where JAX's own would scatter-add.
    """
    return _gather(x, order, back) if has_reference_ops() else _permute(x, order, back)


def _gather(x: Array, order: Array, back: Array) -> Array:
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), 1)


def _take_forward(x: Array, order: Array, back: Array) -> tuple[Array, tuple[Array, Array]]:
    return _permute(x, order, back), (order, back)


def _take_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray, np.ndarray]:
    order, back = saved
    none = np.zeros(order.shape, jax.dtypes.float0)
    return _permute(gradient, back, order), none, none


_permute = OwnGradient(_gather)
_permute.defvjp(_take_forward, _take_backward)
