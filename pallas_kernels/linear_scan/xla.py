"""A parallel scan whose gradient is one more scan, from the end."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.linear_scan.reference import decayed

SEQUENTIAL = 8
"""Up to this many steps are taken one after another."""


def linear_scan_xla(
    a: Float[Array, "*#S T D"],
    b: Float[Array, "*S T D"],
    *,
    initial: Float[Array, "*S D"] | None = None,
    reverse: bool = False,
) -> Float[Array, "*S T D"]:
    """Compute `linear_scan` by XLA."""
    a, b, initial = vary_alike(a, b, initial)
    if reverse:
        a, b = jnp.flip(a, -2), jnp.flip(b, -2)
    if initial is not None:
        first = b[..., :1, :] + decayed(a[..., :1, :], initial[..., None, :])
        b = jnp.concatenate([first, b[..., 1:, :]], -2)
    h = _scan(a, b)
    return jnp.flip(h, -2) if reverse else h


@OwnGradient
def _scan(a: Float[Array, "*#S T D"], b: Float[Array, "*S T D"]) -> Float[Array, "*S T D"]:
    """Return h from h_{-1} = 0.

    The gradient is the same recurrence from the end, g_t = dh_t + a_{t+1} g_{t+1}, with db_t = g_t and
    da_t = g_t h_{t-1}. Do not leave it to JAX: the gradient of `associative_scan` had not compiled for an H200 after
    two minutes.
    """
    return _states(a, b)


def _states(a: Array, b: Array) -> Array:
    if b.shape[-2] <= SEQUENTIAL:
        return _one_by_one(a, b)

    def join(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] * later[0], _past(later[0], earlier[1]) * later[0] + later[1]

    return lax.associative_scan(join, (a, b), axis=b.ndim - 2)[1]


def _one_by_one(a: Array, b: Array) -> Array:
    h = [b[..., 0, :]]
    for t in range(1, b.shape[-2]):
        h.append(a[..., t, :] * _past(a[..., t, :], h[-1]) + b[..., t, :])
    return jnp.stack(h, -2)


def _past(a: Array, h: Array) -> Array:
    """Return h, and 0 where a is 0: `decayed`, with two operations less.

    It has no derivative. a stands for the 0: a constant would be kept for the gradient of a loop around it, and Shardy
    crashes on that.
    """
    return jnp.where(a == 0, a, h)


def _forward(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    h = _scan(a, b)
    return h, (a, h)


def _backward(kept: tuple[Array, Array], dh: Array) -> tuple[Array, Array]:
    a, h = kept
    # Roll the factors, so that the one that no gradient passes comes first, where no state is before it.
    g = jnp.flip(_scan(jnp.roll(jnp.flip(a, -2), 1, -2), jnp.flip(dh, -2)), -2)
    # Keep the scans out of the sum over rows: without the barrier XLA for an H200 does them again inside of it.
    h, g = lax.optimization_barrier((h, g))
    da = g * jnp.pad(h[..., :-1, :], [(0, 0)] * (h.ndim - 2) + [(1, 0), (0, 0)])
    shared = [axis for axis in range(a.ndim - 2) if a.shape[axis] != g.shape[axis]]
    return da.sum(shared, keepdims=True) if shared else da, g


_scan.defvjp(_forward, _backward)
