"""Attention to keys that several devices hold, as partial attention merged by log-sum-exp in fp32; inside islands."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxblt.parallel.sequence import SEQ_AXIS
from pallas_kernels.attention import Partial


def merge_devices(partial: Partial) -> Float[Array, "B T H K"]:
    """Return attention of queries that all devices of the sequence hold to the keys of all of them.

    o = sum_i e^(lse_i - top) o_i / sum_i e^(lse_i - top), top = max_i lse_i. The result is the same on every device.
    The exchange has the outputs' size, whatever the number of keys.
    """
    top = lax.pmax(partial.lse, SEQ_AXIS)
    weight = jnp.exp(partial.lse - top)
    weighted = partial.o.astype(jnp.float32) * weight.swapaxes(1, 2)[..., None]
    o, total = lax.psum((weighted, weight), SEQ_AXIS)
    return o / total.swapaxes(1, 2)[..., None]


def ring_pass[C, H](visit: Callable[[C, H], C], carry: C, held: H, hops: tuple[int, ...] | None = None) -> C:
    """Return each device's `carry` after `visit(carry, held)` with each other device's `held`.

    The device just before it comes first.

    Args:
      visit, carry, held: of each device.
      hops: the distances r at which device i visits what device i - r holds, rising; None for all.
    """
    n = lax.axis_size(SEQ_AXIS)

    def hop(by: int, both: tuple[C, H]) -> tuple[C, H]:
        carry, held = both
        held = jax.tree.map(lambda x: lax.ppermute(x, SEQ_AXIS, [(i, (i + by) % n) for i in range(n)]), held)
        return visit(carry, held), held

    for first, last in _runs(range(1, n) if hops is None else hops):
        both = carry, held
        if first > 1:
            both, first = hop(first, both), first + 1
        if first <= last:
            both = lax.fori_loop(first, last + 1, lambda _, both: hop(1, both), both)
        carry = both[0]
    return carry


def _runs(hops: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of consecutive numbers."""
    firsts = [r for r in hops if r - 1 not in hops]
    return list(zip(firsts, [r for r in hops if r + 1 not in hops], strict=True))
