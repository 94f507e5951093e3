"""Which keys of other devices a static rule needs, told while a program is traced: no others are exchanged."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from jaxblt.parallel.attention.plan import Plan
from pallas_kernels.attention.rules import Box, Global, Or, Rule, Span


class Exchange(NamedTuple):
    """The keys that reach a device.

    Attributes:
      hops: distances r at which device i gets all keys of device i - r, rising.
      first: tokens at the start of a document that it gets of the other devices; 0 for none.
    """

    hops: tuple[int, ...]
    first: int = 0


def plan_exchange(plan: Plan, length: int, *, packed: bool) -> Exchange:
    """Return what a rule needs of other devices, in a call without a cache.

    Args:
      plan: its rule is static.
      length: tokens of a device.
      packed: positions begin anew in each document.
    """
    assert plan.rule is not None
    exchange = Exchange(_live_hops(plan, plan.rule, length, packed))
    rest, first = _split_global(plan.rule)
    if not plan.causal or not first:
        return exchange
    hops = () if rest is None else _live_hops(plan, rest, length, packed)
    others = plan.devices.size - 1
    return Exchange(hops, first) if others * first < (len(exchange.hops) - len(hops)) * length else exchange


def _live_hops(plan: Plan, rule: Rule, length: int, packed: bool) -> tuple[int, ...]:
    """Return the hops at which the rule shows some device a key."""
    box, device = _stretches(plan.devices.size, length, packed), np.arange(plan.devices.size)
    live: Bool[np.ndarray, "n n"] = plan.band.interval.bounds(box).some & rule.bounds(box).some
    live = np.broadcast_to(live, (device.size, device.size))
    return tuple(r for r in range(1, device.size) if live[device, device - r].any())


def _stretches(devices: int, length: int, packed: bool) -> Box:
    """Return the queries of each device with the keys of each.

    In a document that starts at s the pair of indices (t, u) has positions (t - s, u - s). Its distance is that of the
    indices, and its positions lie anywhere from 0 up to them.
    """
    start = np.arange(devices, dtype=np.int32) * length
    q, k = (Span(x, x + length - 1, None) for x in (start[:, None], start[None]))
    if not packed:
        return Box(q, k)
    return Box(*(span._replace(least=0 * span.least) for span in (q, k)), apart=Box(q, k).distance)


def _split_global(rule: Rule) -> tuple[Rule | None, int]:
    """Return a rule without its alternatives `Global(first)`, None if nothing is left, and the largest `first`.

    Under a causal mask these show no other keys than the first ones: a global query sees only keys before it, which are
    global too.
    """
    if isinstance(rule, Global) and rule.every is None:
        return None, rule.first
    if not isinstance(rule, Or):
        return rule, 0
    (a, first_a), (b, first_b) = _split_global(rule.a), _split_global(rule.b)
    rest = a | b if a is not None and b is not None else a or b
    return rest, max(first_a, first_b)
