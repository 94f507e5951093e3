"""A few taps as a sum of shifted products: no matrix, no transform."""

import operator
from functools import reduce

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._own_gradient import OwnGradient


def shift(x: Array, steps: int, fill: int = 0) -> Array:
    """Delay x by `steps` along its last axis; `fill` enters at the front."""
    pad = [(0, 0)] * (x.ndim - 1) + [(steps, 0)]
    return jnp.pad(x[..., : x.shape[-1] - steps], pad, constant_values=fill)


def _advance(x: Array, steps: int) -> Array:
    """Transpose `shift`."""
    return jnp.pad(x[..., steps:], [(0, 0)] * (x.ndim - 1) + [(0, steps)])


def _within(documents: Array | None, steps: int, x: Array) -> Array:
    """Return x where a step and the one `steps` before it are of one document, else zero."""
    if documents is None or steps == 0:
        return x
    same = documents == shift(documents, steps, fill=-1)
    return jnp.where(same[:, None], x, jnp.zeros((), x.dtype))


def _tap(taps: Array, k: int, rank: int) -> Array:
    return taps[:, k].reshape(1, -1, *[1] * (rank - 2))


@OwnGradient
def _sum_of_products(u: Array, taps: Array, documents: Array | None) -> Array:
    wide = accumulator(u.dtype)
    u, taps = u.astype(wide), taps.astype(wide)
    terms = [_tap(taps, k, u.ndim) * shift(u, k) for k in range(min(taps.shape[1], u.shape[-1]))]
    return reduce(operator.add, (_within(documents, k, term) for k, term in enumerate(terms)))


def _forward(
    u: Array, taps: Array, documents: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return _sum_of_products(u, taps, documents), (u, taps, documents)


def _backward(residuals: tuple[Array, Array, Array | None], g: Array) -> tuple[Array, Array, None]:
    u, taps, documents = residuals
    wide, count = g.dtype, min(taps.shape[1], u.shape[-1])
    seen = [_within(documents, k, g) for k in range(count)]
    weighted = (_tap(taps.astype(wide), k, u.ndim) * _advance(seen[k], k) for k in range(count))
    du = reduce(operator.add, weighted)
    products = [seen[k] * shift(u.astype(wide), k) for k in range(count)]
    # Reduce once for all taps: K reductions would read u and g K times.
    sums = lax.reduce(
        tuple(products),
        tuple(jnp.zeros((), wide) for _ in products),
        lambda a, b: tuple(map(operator.add, a, b)),
        (0, *range(2, u.ndim)),
    )
    dtaps = jnp.pad(jnp.stack(sums, 1), ((0, 0), (0, taps.shape[1] - count)))
    return du.astype(u.dtype), dtaps.astype(taps.dtype), None


_sum_of_products.defvjp(_forward, _backward)


def shifted_products(
    u: Float[Array, "B D *N T"],
    taps: Float[Array, "D K"],
    documents: Int[Array, "B *N T"] | None = None,
) -> Float[Array, "B D *N T"]:
    """Return y_t = sum_k taps_k u_{t-k} over the last axis, within a document.

    It is in the accumulator's dtype. Backward keeps u in its own dtype, and no shifted copy of it.
    """
    u, taps, documents = vary_alike(u, taps, documents)
    return _sum_of_products(u, taps, documents)
