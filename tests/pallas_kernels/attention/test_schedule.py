"""Schedules: what is listed, in which order, and that the device lists what the host does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.blocks import Blocks
from pallas_kernels.attention.choices import Chosen, by_query
from pallas_kernels.attention.presets import bigbird
from pallas_kernels.attention.rules import Custom, Global, Interval, Rule, Strided
from pallas_kernels.attention.schedule import Live, Schedule, Tokens, find_live, hides_nothing

GRID = Blocks(52, 52, 8, 4, Interval(after=0), by_index=True)
INDEX = np.arange(52)
RULES: tuple[Rule, ...] = (
    Interval(20) | Global(first=3),
    bigbird(block=4, random=1),
    ~Strided(5),
    Custom(lambda q, k: (q - k) % 3 < 2),
)
NOTHING = Tokens(None, None)


def _truth(rule: Rule) -> Live:
    seen = rule.sees(INDEX[:, None], INDEX[None]) & (INDEX[:, None] >= INDEX[None])
    hidden = np.pad(~np.asarray(seen), ((0, 4), (0, 0)), mode="edge").reshape(7, 8, 13, 4)
    return Live((~hidden).any((1, 3)), (~hidden).all((1, 3)))


def _kinds(schedule: Schedule, shape: tuple[int, int]) -> np.ndarray:
    """Return 0 for empty, 1 for partial and 2 for full pairs."""
    kinds = np.zeros(shape, int)
    live = len(schedule.pairs) if schedule.count is None else int(schedule.count)
    for i, j, partial in np.asarray(schedule.pairs)[:live]:
        assert kinds[i, j] == 0, "a pair is listed twice"
        kinds[i, j] = 2 - partial
    return kinds


def test_live_pairs_are_those_of_the_dense_mask() -> None:
    for rule in RULES:
        found, truth = find_live(GRID, rule, NOTHING, NOTHING), _truth(rule)
        assert not np.any(truth.some & ~found.some)
        assert not np.any(found.full & ~truth.full)
        if not isinstance(rule, type(RULES[0])):
            np.testing.assert_array_equal(found.some, truth.some)


def test_a_rule_that_hides_nothing_is_told() -> None:
    for rule, idle in (
        (Interval(255) | Global(first=3), True),
        (Interval(254, 0) & Strided(1), False),
        (Strided(1), True),
        (~Strided(5), False),
        (Custom(lambda q, k: q - k < 256), True),
    ):
        assert hides_nothing(rule, Interval(after=0), 256, 256) == idle, rule
    tried: list[int] = []
    slow = Custom(lambda q, k: tried.append((q * k).size) or q - k < 99)
    assert not hides_nothing(slow, Interval(after=0), 131_072, 131_072)
    assert max(tried) <= 64 * 64


def test_rows_come_longest_first_and_full_pairs_before_partial_ones() -> None:
    live = find_live(GRID, RULES[0], NOTHING, NOTHING)
    for transposed in (False, True):
        schedule = live.schedule(transposed=transposed)
        lengths = np.diff(schedule.starts)
        assert (np.diff(lengths) <= 0).all()
        kinds = _kinds(schedule, (7, 13))
        np.testing.assert_array_equal(kinds, np.where(live.full, 2, live.some))
        for row, start, end in zip(schedule.rows, schedule.starts[:-1], schedule.starts[1:], strict=True):
            pairs = schedule.pairs[start:end]
            assert (pairs[:, int(transposed)] == row).all()
            assert (np.diff(pairs[:, 2]) >= 0).all()


@pytest.mark.slow(days=28, group="properties of kernels")
def test_the_device_lists_what_the_host_does() -> None:
    """Given positions that are indices and tags of one document, both know the same."""
    rows = jnp.asarray(np.pad(INDEX, (0, 4), mode="edge"), jnp.int32)
    q, k = (Tokens(jnp.where(rows[: 52 + pad] >= 0, 1, 0).reshape(-1, 1, size), rows[: 52 + pad].reshape(-1, 1, size))
            for pad, size in ((4, 8), (0, 4)))  # fmt: skip

    @jax.jit
    def listed(q: Tokens, k: Tokens) -> list[Schedule]:
        return [find_live(GRID, rule, q, k).schedule() for rule in RULES]

    for rule, schedule in zip(RULES, listed(q, k), strict=True):
        expected = find_live(GRID, rule, NOTHING, NOTHING).schedule()
        np.testing.assert_array_equal(_kinds(schedule, (7, 13)), _kinds(expected, (7, 13)))
        np.testing.assert_array_equal(schedule.starts, expected.starts)
        assert len(schedule.pairs) == 7 * 13


def test_documents_and_chosen_blocks_leave_pairs_out() -> None:
    """A pair is live if the documents of both blocks meet, and some query's list has one of the keys' blocks."""
    ids = np.repeat([1, 2, 0, 3], [17, 20, 7, 12])
    start = np.repeat([0, 17, 37, 44], [17, 20, 7, 12])
    rng = np.random.default_rng(0)
    lists = rng.integers(-1, 5, (1, 2, 52, 2)).astype(np.int32)
    q_tags, k_tags = (np.where(ids > 0, ids, fill).astype(np.int32) for fill in (0, -1))
    places = (np.arange(56) - start).astype(np.int32)
    q = Tokens(*(jnp.asarray(x).reshape(7, 1, 8) for x in (q_tags, places)))
    k = Tokens(*(jnp.asarray(x[:52]).reshape(13, 1, 4) for x in (k_tags, places)))
    rule = by_query(Chosen(jnp.asarray(lists), 4), 52)
    cut = np.pad(lists, ((0, 0), (0, 0), (0, 4), (0, 0)), constant_values=-1)
    rule = jax.tree.map(
        lambda _: jnp.asarray(cut).reshape(1, 2, 1, 7, 8, 2).transpose(3, 0, 1, 2, 4, 5), rule
    )
    live = jax.jit(lambda: find_live(GRID, rule, q, k))()

    chosen = (lists[0, :, :, None] == (places[:52] // 4)[None, None, :, None]).any((0, 3))
    seen = (q_tags[:52, None] == k_tags[None, :52]) & (places[:52, None] >= places[None, :52]) & chosen
    truth = np.pad(seen, ((0, 4), (0, 0))).reshape(7, 8, 13, 4).any((1, 3))
    assert not np.any(truth & ~np.asarray(live.some))
    assert not np.any(live.full)
    assert np.asarray(live.some).sum() < 0.6 * 7 * 13
