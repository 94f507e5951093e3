"""The definition: one step after another."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike


def linear_scan_reference(
    a: Float[Array, "*#S T D"],
    b: Float[Array, "*S T D"],
    *,
    initial: Float[Array, "*S D"] | None = None,
    reverse: bool = False,
) -> Float[Array, "*S T D"]:
    """Compute `linear_scan` by its definition.

    It has derivatives of any order, forward mode too.
    """

    def step(h: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        h = decayed(now[0], h) + now[1]
        return h, h

    start = jnp.zeros_like(b[..., 0, :]) if initial is None else initial
    start, a, b = vary_alike(start, a, b)
    _, h = lax.scan(step, start, (jnp.moveaxis(a, -2, 0), jnp.moveaxis(b, -2, 0)), reverse=reverse)
    return jnp.moveaxis(h, 0, -2)


def decayed(a: Float[Array, "..."], h: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return a h, and 0 where a is 0 and h not finite.

    0 times NaN would hand a document's NaN on to the next document.
    """
    lost = (a == 0) & ~jnp.isfinite(h)
    return a * jnp.where(lost, jnp.zeros((), h.dtype), h)
