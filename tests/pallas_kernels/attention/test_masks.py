"""Masks that combine: what each lets a query see, what stays static, what does not combine."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import masks
from pallas_kernels.attention.masks import Interval, Mask

T = 6
IDS = jnp.asarray([[1, 1, -1, 1, 2, 0], [3, 3, 3, 3, 3, 3]], jnp.int32)
LENGTHS = jnp.asarray([5, 2], jnp.int32)
HERE = jnp.asarray([[9, 8, 7, 6, 5, 4]] * 2, jnp.int32)
THERE = jnp.arange(3, 3 + T, dtype=jnp.int32)[None].repeat(2, 0)
# Keep the loop below from slicing on the device for each pair
ids, lengths, here, there = map(np.asarray, (IDS, LENGTHS, HERE, THERE))
CONDITIONS = {
    "causal": (masks.CAUSAL, lambda b, t, s, distance: distance >= 0),
    "window": (masks.window(3), lambda b, t, s, distance: abs(distance) < 3),
    "documents": (masks.documents(IDS), lambda b, t, s, _: ids[b, t] == ids[b, s] > 0),
    "queries": (masks.query_lengths(LENGTHS), lambda b, t, s, _: t < lengths[b]),
    "keys": (masks.key_lengths(LENGTHS), lambda b, t, s, _: s < lengths[b]),
    "positions": (masks.positions(HERE, THERE), lambda b, t, s, _: True),
}


@pytest.mark.parametrize("names", list(itertools.combinations(CONDITIONS, 3)), ids="_".join)
def test_a_key_is_visible_iff_every_mask_says_so(names: tuple[str, ...]) -> None:
    mask, by_position = masks.FULL, "positions" in names
    for name in names:
        mask &= CONDITIONS[name][0]
    found = np.broadcast_to(np.asarray(mask.dense(T, T)), (2, T, T))
    for b, t, s in np.ndindex(2, T, T):
        distance = int(here[b, t] - there[b, s]) if by_position else t - s
        assert found[b, t, s] == all(CONDITIONS[name][1](b, t, s, distance) for name in names), (b, t, s)


@pytest.mark.parametrize("mask", [masks.band(True, 3), masks.CAUSAL & masks.window(3) & masks.window(5)])
def test_intervals_meet(mask: Mask) -> None:
    assert mask.interval == Interval(2, 0)
    assert (mask.interval.causal, mask.interval.window) == (True, 3)
    assert masks.band(False, None) == masks.FULL == masks.window(None) == masks.documents(None)


@pytest.mark.parametrize(
    "interval", [Interval(), Interval(after=0), Interval(3, 0), Interval(2, 2), Interval(0, 0)]
)
def test_the_reach_of_a_run_of_queries_holds_what_any_of_them_sees(interval: Interval) -> None:
    seen = np.asarray(Mask(interval).dense(12, 12))[0]
    for first, last in ((0, 3), (4, 7), (8, 11), (8, 15)):
        columns = np.flatnonzero(seen[first : last + 1].any(0))
        low, high = interval.reach(first, last, 12)
        assert low <= columns[0]
        assert columns[-1] < high
        if last < 12:
            assert (low, high) == (columns[0], columns[-1] + 1)


def test_intervals_are_static_and_numbers_are_not() -> None:
    traced = []

    @jax.jit
    def see(mask: Mask) -> jax.Array:
        traced.append(hash(mask.interval))
        return mask.dense(T, T)

    for lengths in (LENGTHS, LENGTHS + 1):
        for mask in (masks.CAUSAL, masks.window(2)):
            see(mask & masks.token_lengths(lengths))
    assert len(traced) == 2


def test_lengths_of_two_masks_give_the_shorter() -> None:
    mask = masks.key_lengths(LENGTHS) & masks.key_lengths(jnp.asarray([3, 3]))
    np.testing.assert_array_equal(mask.kv_lengths, [3, 2])


@pytest.mark.parametrize("mask", [masks.documents(IDS), masks.positions(HERE, THERE)])
def test_two_numbers_for_a_token_are_refused(mask: Mask) -> None:
    with pytest.raises(ValueError, match="do not combine"):
        mask & mask  # pyright: ignore[reportUnusedExpression]
