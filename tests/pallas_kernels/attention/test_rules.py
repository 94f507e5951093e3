"""Rules: what each shows, that blocks are told rightly by intervals, what is refused."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Chosen, masks
from pallas_kernels.attention.presets import bigbird, local_global, longformer
from pallas_kernels.attention.rules import (
    BlocksBefore,
    Box,
    ByBlock,
    Custom,
    Dilated,
    Global,
    Interval,
    PrefixLM,
    RandomBlocks,
    Rule,
    Span,
    Strided,
    is_static,
)

T = 60


def _odd(q, k):
    return (q + 2 * k) % 7 < 3


LEAVES: dict[str, tuple[Rule, object]] = {
    "all": (Interval(), lambda q, k: True),
    "causal": (Interval(after=0), lambda q, k: k <= q),
    "later": (Interval(after=-1), lambda q, k: k < q),
    "window": (Interval(5, 3), lambda q, k: -3 <= q - k <= 5),
    "first": (Global(first=7), lambda q, k: q < 7 or k < 7),
    "columns": (Global(first=2, every=9, rows=False), lambda q, k: k < 2 or k % 9 == 0),
    "every": (Global(every=8), lambda q, k: q % 8 == 0 or k % 8 == 0),
    "each": (Global(every=1), lambda q, k: True),
    "strided": (Strided(6), lambda q, k: (q - k) % 6 == 0),
    "strided_1": (Strided(1), lambda q, k: True),
    "dilated": (Dilated(16), lambda q, k: abs(q - k) in (0, 1, 2, 4, 8, 16)),
    "dilated_3": (Dilated(30, base=3), lambda q, k: abs(q - k) in (0, 1, 3, 9, 27)),
    "prefix": (PrefixLM(11), lambda q, k: k < 11 or k <= q),
    "custom": (Custom(_odd), lambda q, k: (q + 2 * k) % 7 < 3),
    "before": (BlocksBefore(10), lambda q, k: k < q // 10),
    "blocks": (ByBlock(Interval(1, 0), 10), lambda q, k: 0 <= q // 10 - k // 10 <= 1),
}
RANDOM = {
    "random": RandomBlocks(2, seed=3, block=8),
    "random_1": RandomBlocks(1, seed=0, block=3),
}
RULES = {name: rule for name, (rule, _) in LEAVES.items()} | RANDOM


@functools.cache
def _dense(rule: Rule) -> np.ndarray:
    index = np.arange(T, dtype=np.int32)
    return np.broadcast_to(np.asarray(rule.sees(index[:, None], index[None])), (T, T))


@pytest.mark.parametrize("name", RULES)
def test_shift_invariant_rules_read_distances_alone(name: str) -> None:
    """So do the rules that join them; with a rule of places beside them none does."""
    rule, places = RULES[name], np.arange(T)
    expected = name in ("all", "causal", "later", "window", "strided", "strided_1", "dilated", "dilated_3")
    assert rule.is_shift_invariant is expected
    assert (~rule & Strided(4) | Interval(2, 0)).is_shift_invariant is expected
    if expected:
        moved = rule.sees(places[:, None] + 7, places[None] + 7)
        np.testing.assert_array_equal(moved, rule.sees(places[:, None], places[None]))


def _span(size: int, axis: int) -> Span:
    tokens = np.minimum(np.arange(-(-T // size) * size, dtype=np.int32), T - 1).reshape(-1, size)
    return Span(np.expand_dims(tokens.min(-1), axis), np.expand_dims(tokens.max(-1), axis), tokens)


def _told(rule: Rule, block_q: int, block_k: int) -> tuple[np.ndarray, ...]:
    """Return `some` and `every` by the rule's bounds, then the truth."""
    bounds = rule.bounds(Box(_span(block_q, -1), _span(block_k, -2)))
    dense = _dense(rule)
    rows, columns = (range(0, T, size) for size in (block_q, block_k))
    truth = [
        np.array([[over(dense[i : i + block_q, j : j + block_k]) for j in columns] for i in rows])
        for over in (np.any, np.all)
    ]
    return *(np.broadcast_to(x, truth[0].shape) for x in bounds), *truth


@pytest.mark.parametrize("name", LEAVES)
def test_a_rule_shows_what_it_says(name: str) -> None:
    rule, says = LEAVES[name]
    assert _dense(rule).tolist() == [[bool(says(q, k)) for k in range(T)] for q in range(T)]  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sizes", [(4, 4), (16, 7), (1, 10), (60, 60), (3, 20)], ids=str)
def test_blocks_are_told_by_intervals(name: str, sizes: tuple[int, int]) -> None:
    some, every, any_seen, all_seen = _told(RULES[name], *sizes)
    assert not np.any(any_seen & ~some), "a block with visible pairs is called empty"
    assert not np.any(every & ~all_seen), "a block with hidden pairs is called full"
    # Only blocks that are longer than what is looked at one by one may be called partial for caution.
    if name not in RANDOM or max(sizes) <= 4 * RANDOM[name].block:
        np.testing.assert_array_equal(some, any_seen)
        np.testing.assert_array_equal(every, all_seen)


def _tree(rng: random.Random, depth: int) -> Rule:
    if depth == 0 or rng.random() < 0.2:
        return RULES[rng.choice(sorted(RULES))]
    a, b = _tree(rng, depth - 1), _tree(rng, depth - 1)
    return rng.choice([a & b, a | b, ~a, a & ~b])


@pytest.mark.parametrize("seed", range(40))
def test_joined_rules_are_told_without_a_wrong_word(seed: int) -> None:
    rng = random.Random(seed)
    rule = _tree(rng, 3)
    some, every, any_seen, all_seen = _told(rule, rng.choice([1, 4, 9, 16]), rng.choice([1, 5, 8, 32]))
    assert not np.any(any_seen & ~some)
    assert not np.any(every & ~all_seen)
    assert hash(rule) == hash(rule)
    assert is_static(rule)


def test_numpy_and_jax_agree() -> None:
    """The reference, the schedule of the host and that of the device read one function."""
    boxes = Box(_span(4, -1), _span(6, -2))
    index = np.arange(T, dtype=np.int32)

    @jax.jit
    def run(box: Box, index: jax.Array) -> dict:
        sees = lambda rule: rule.sees(index[:, None], index[None])  # noqa: E731
        return {name: (sees(rule), *rule.bounds(box)) for name, rule in RULES.items()}

    for name, (seen, some, every) in run(boxes, index).items():
        bounds = RULES[name].bounds(boxes)
        np.testing.assert_array_equal(np.broadcast_to(seen, (T, T)), _dense(RULES[name]))
        assert not np.any(np.asarray(bounds.some) & ~np.asarray(some)), name
        assert not np.any(np.asarray(every) & ~np.asarray(bounds.every)), name


def test_masks_of_papers() -> None:
    index = np.arange(T)
    q, k = index[:, None], index[None]
    expected = ((q - k <= 64) & (k - q <= 63)) | (q % 64 == 0) | (k % 64 == 0)
    np.testing.assert_array_equal(local_global().sees(q, k), expected)
    far = np.arange(300)
    assert Dilated(64).sees(far[:, None], far[None]).sum(1).max() == 15
    np.testing.assert_array_equal(
        longformer(window=8, first=2).sees(q, k), (abs(q - k) <= 4) | (q < 2) | (k < 2)
    )
    np.testing.assert_array_equal(
        longformer(window=8, dilation=3, first=0).sees(q, k), (abs(q - k) <= 12) & ((q - k) % 3 == 0)
    )
    seen = bigbird(block=4, near=1, random=2, first=1).sees(q, k).reshape(15, 4, 15, 4)
    blocks = seen[:, 0, :, 0]
    np.testing.assert_array_equal(seen, np.broadcast_to(blocks[:, None, :, None], seen.shape))
    near = abs(np.subtract.outer(range(15), range(15))) <= 1
    assert blocks[near].all()
    assert blocks[0].all()
    assert blocks[:, 0].all()
    drawn = np.tril(blocks & ~near, -1)[:, 1:].sum(1)
    assert 0 < drawn.max() <= 2


def test_draws_depend_on_the_seed_and_on_no_later_block() -> None:
    index = np.arange(64)
    first, second = (RandomBlocks(2, seed, 1).sees(index[:, None], index[None]) for seed in (0, 1))
    assert (first != second).any()
    np.testing.assert_array_equal(first, first.T)
    # Each of the 64 blocks draws twice, evenly from those up to itself.
    shares = [
        np.mean(np.flatnonzero(row[: i + 1])) / i for i, row in enumerate(first) if i > 16 and row[:i].any()
    ]
    assert 0.35 < np.mean(shares) < 0.65


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Strided(0), r"Strided\.stride must be a whole number of at least 1, got 0"),
        (lambda: Global(first=-1), r"Global\.first .* got -1"),
        (lambda: Global(every=2.5), r"Global\.every .* got 2\.5"),
        (lambda: Dilated(4, base=1), r"Dilated\.base .* at least 2, got 1"),
        (lambda: RandomBlocks(True), r"RandomBlocks\.count .* got True"),
        (lambda: PrefixLM(0), r"PrefixLM\.length .* got 0"),
        (lambda: ByBlock(Interval(), 0), r"ByBlock\.size .* got 0"),
        (lambda: Custom(lambda q, k: q - k), r"elementwise fn\(q, k\).* gave int"),
        (lambda: Custom(lambda q, k: jnp.ones((5, 1), bool)), "elementwise"),
        (lambda: Custom(lambda q, k: (q <= k) | (q < jnp.max(k))), "elementwise"),
    ],
)
def test_bad_rules_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_rules_join_masks() -> None:
    rule, lists = Strided(3), Chosen(jnp.zeros((1, 1, 4, 2), jnp.int32), 8)
    assert (masks.CAUSAL & rule).rule == (rule & masks.CAUSAL).rule == rule
    assert masks.CAUSAL & Interval(4, 4) == masks.band(True, 5)
    assert (masks.FULL & rule & Global(1)).rule == rule & Global(1)
    assert not is_static(rule | lists)
    assert (rule | lists).grain == 8
    assert (ByBlock(PrefixLM(1)) & rule).looks_ahead
    with pytest.raises(TypeError, match="unsupported operand"):
        rule | masks.CAUSAL  # pyright: ignore[reportUnusedExpression, reportOperatorIssue]


def test_a_function_is_tried_outside_of_the_mesh_in_force():
    """Its devices may be absent, as of a plan."""
    meshes = []

    def sees(q, k):
        meshes.append(jax.sharding.get_abstract_mesh())
        return q >= k

    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        jax.jit(lambda x: [Custom(sees), x][1])(1)
    assert [mesh.empty for mesh in meshes] == [True, True]
