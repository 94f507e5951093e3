"""Attention to keys that several devices hold, in parts that merge exactly by log-sum-exp in fp32; inside islands."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxblt.parallel.attention.ring import Ring, ring_part
from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.layout import ZIGZAG, to_contiguous, to_zigzag
from jaxblt.parallel.sequence import SEQ_AXIS
from pallas_kernels.attention import Part


def merge_devices(part: Part) -> Float[Array, "B T H K"]:
    """Attention of queries that all devices of the sequence hold to the keys of all of them.

    o = sum_i e^(lse_i - top) o_i / sum_i e^(lse_i - top), top = max_i lse_i: the same on every device, for an exchange
    of the outputs' size whatever the number of keys.
    """
    top = lax.pmax(part.lse, SEQ_AXIS)
    weight = jnp.exp(part.lse - top)
    weighted = part.o.astype(jnp.float32) * weight.swapaxes(1, 2)[..., None]
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


def balanced_part(ring: Ring, q: Float[Array, "B T H K"], keys: Keys) -> Part:
    """`ring_part` of a causal ring over contiguous stretches, half of which change places if they halve."""
    if q.shape[1] % 2:
        return ring_part(ring, q, keys)
    q, keys = jax.tree.map(lambda x: to_zigzag(x, ring.axis), (q, keys))
    o, lse = ring_part(dataclasses.replace(ring, layout=ZIGZAG), q, keys)
    return Part(to_contiguous(o, ring.axis), to_contiguous(lse.swapaxes(1, 2), ring.axis).swapaxes(1, 2))
