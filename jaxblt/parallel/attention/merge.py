"""Attention to keys that several devices hold, as partial attention merged by log-sum-exp in fp32; inside islands."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxblt.parallel.sequence import SEQ_AXIS
from pallas_kernels.attention import Partial


def merge_devices(partial: Partial) -> Float[Array, "B T H K"]:
    """Return attention of queries that all devices of the sequence hold to the keys of all of them.

    o = sum_i e^(lse_i - top) o_i / sum_i e^(lse_i - top), top = max_i lse_i: the same on every device, for an exchange
    of the outputs' size whatever the number of keys.
    """
    top = lax.pmax(partial.lse, SEQ_AXIS)
    weight = jnp.exp(partial.lse - top)
    weighted = partial.o.astype(jnp.float32) * weight.swapaxes(1, 2)[..., None]
    o, total = lax.psum((weighted, weight), SEQ_AXIS)
    return o / total.swapaxes(1, 2)[..., None]


def ring_pass[C, H](visit: Callable[[C, H], C], carry: C, held: H) -> C:
    """Return each device's `carry` after `visit(carry, held)` with all others' `held`, nearest before it first."""
    n = lax.axis_size(SEQ_AXIS)

    def hop(_: Array, both: tuple[C, H]) -> tuple[C, H]:
        carry, held = both
        held = jax.tree.map(lambda x: lax.ppermute(x, SEQ_AXIS, [(i, (i + 1) % n) for i in range(n)]), held)
        return visit(carry, held), held

    return lax.fori_loop(1, n, hop, (carry, held))[0]
