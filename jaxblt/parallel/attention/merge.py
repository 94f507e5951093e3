"""Attention to keys that several devices hold, as partial attention merged by log-sum-exp in fp32; inside islands."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxblt.parallel.attention.ring import Ring, partial_ring_attention
from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.layout import ZIGZAG, to_contiguous, to_zigzag
from jaxblt.parallel.sequence import SEQ_AXIS
from pallas_kernels.attention import Partial


def merge_devices(partial: Partial) -> Float[Array, "B T H K"]:
    """Attention of queries that all devices of the sequence hold to the keys of all of them.

    o = sum_i e^(lse_i - top) o_i / sum_i e^(lse_i - top), top = max_i lse_i: the same on every device, for an exchange
    of the outputs' size whatever the number of keys.
    """
    top = lax.pmax(partial.lse, SEQ_AXIS)
    weight = jnp.exp(partial.lse - top)
    weighted = partial.o.astype(jnp.float32) * weight.swapaxes(1, 2)[..., None]
    o, total = lax.psum((weighted, weight), SEQ_AXIS)
    return o / total.swapaxes(1, 2)[..., None]


def ring_pass[C, H](visit: Callable[[C, H], C], carry: C, held: H) -> C:
    """`carry` of each device after `visit(carry, held)` with what every other device holds, nearest before it first."""
    n = lax.axis_size(SEQ_AXIS)

    def hop(_: Array, both: tuple[C, H]) -> tuple[C, H]:
        carry, held = both
        held = jax.tree.map(lambda x: lax.ppermute(x, SEQ_AXIS, [(i, (i + 1) % n) for i in range(n)]), held)
        return visit(carry, held), held

    return lax.fori_loop(1, n, hop, (carry, held))[0]


def balanced_ring(ring: Ring, q: Float[Array, "B T H K"], keys: Keys) -> Partial:
    """`partial_ring_attention` of a causal ring in the order of the text, in the zig-zag order if stretches halve."""
    if q.shape[1] % 2:
        return partial_ring_attention(ring, q, keys)
    q, keys = jax.tree.map(lambda x: to_zigzag(x, ring.axis), (q, keys))
    o, lse = partial_ring_attention(dataclasses.replace(ring, layout=ZIGZAG), q, keys)
    return Partial(to_contiguous(o, ring.axis), to_contiguous(lse.swapaxes(1, 2), ring.axis).swapaxes(1, 2))
