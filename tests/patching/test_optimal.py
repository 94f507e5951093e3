import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.patching import PatcherConfig, make_patches, segmentation_cost
from tests.patching.cases import patch

SIZE, ROWS = 14, 24
RNG = np.random.default_rng(7)
ENTROPIES = RNG.uniform(0, 5, (ROWS, SIZE)).astype(np.float32)
# Eighths: ties of cost happen, and the sums of the brute force are exact.
ENTROPIES[::2] = np.round(ENTROPIES[::2] * 8) / 8
COUNTS = np.where(np.arange(ROWS) < 8, SIZE, RNG.integers(1, SIZE + 1, ROWS))
SEGMENTS = (np.arange(SIZE) < COUNTS[:, None]).astype(np.int32)
IDS = np.full((ROWS, SIZE), 70, np.int32)


cost_of = jax.jit(segmentation_cost, static_argnums=0)


def run(config, judge, ids, entropies, segments):
    """The patches of one config, and what they cost by another's measure."""
    patches = patch(config, ids, segment_ids=segments, entropies=entropies)
    return patches, cost_of(judge, patches, entropies)


@functools.cache
def feasible(n: int, low: int, high: int | None) -> np.ndarray:
    """Every segmentation of n bytes with lengths in low..high, as rows of `does byte t start a patch`.

    If there is none, those in which the last patch alone is shorter.
    """
    inner = np.array(list(itertools.product([False, True], repeat=n - 1)), bool).reshape(2 ** (n - 1), n - 1)
    starts = np.pad(inner, ((0, 0), (1, 0)), constant_values=True)
    lengths = [np.diff(np.append(np.flatnonzero(row), n)) for row in starts]
    short = np.array([part.max() <= (high or n) and (part[:-1] >= low).all() for part in lengths])
    strict = short & np.array([part[-1] >= low for part in lengths])
    return starts[strict if strict.any() else short]


def costs(starts: np.ndarray, entropies: np.ndarray, config: PatcherConfig) -> np.ndarray:
    """As defined: patch_cost, and max(0, entropy of byte t - threshold) for each byte t behind a patch's
    first."""
    n = starts.shape[1]
    of_byte = np.pad(entropies[: n - 1].astype(np.float64), (1, 0))
    surprise = np.where(starts, 0.0, np.maximum(0.0, of_byte - config.threshold))
    return config.patch_cost * starts.sum(1) + surprise.sum(1)


LIMITS = [(1, None), (1, 3), (2, 5), (3, None), (5, 5), (4, 7)]


def check_against(choices: np.ndarray, patches, cost: jax.Array, row: int, config: PatcherConfig) -> None:
    n = COUNTS[row]
    least = costs(choices, ENTROPIES[row], config).min()
    lengths = np.asarray(patches.lengths[row, 0])
    found = np.zeros((1, n), bool)
    found[0, np.cumsum(lengths[lengths > 0]) - lengths[lengths > 0]] = True
    assert (choices == found).all(1).any()
    # Rounding down to 2^-16 nats, once a byte.
    np.testing.assert_allclose(cost[row, 0], least, rtol=0, atol=SIZE * 2.0**-16)
    np.testing.assert_allclose(
        costs(found, ENTROPIES[row], config)[0], least, rtol=0, atol=0 if row % 2 == 0 else SIZE * 2.0**-16
    )


@pytest.mark.slow(days=21)
@pytest.mark.parametrize(("low", "high"), LIMITS)
def test_optimal_equals_brute_force(low, high):
    config = PatcherConfig(
        mode="optimal", threshold=1.5, patch_cost=0.75, min_length=low, max_length=high, block_size=SIZE
    )
    patches, cost = run(config, config, IDS, ENTROPIES, SEGMENTS)
    for row, n in enumerate(COUNTS):
        check_against(feasible(n, low, high), patches, cost, row, config)


@pytest.mark.slow(days=21)
@pytest.mark.parametrize(
    ("low", "high", "number"),
    [(1, None, 4), (1, 3, 5), (2, 5, 4), (3, None, 4), (3, None, 1), (7, 7, 2), (4, 7, 3)],
)
def test_length_constrained_equals_brute_force(low, high, number):
    config = PatcherConfig(
        mode="length_constrained", threshold=1.5, num_patches=number, min_length=low, max_length=high,
        block_size=SIZE,
    )  # fmt: skip
    patches, cost = run(config, config, IDS, ENTROPIES, SEGMENTS)
    for row, n in enumerate(COUNTS):
        wanted = max(min(number, n // low), -(-n // config.longest))
        assert n < SIZE or wanted == number
        choices = feasible(n, low, high)
        check_against(choices[choices.sum(1) == wanted], patches, cost, row, config)


@pytest.fixture(scope="module")
def long():
    rng = np.random.default_rng(1)
    entropies = jnp.asarray(rng.gamma(1.0, 1.2, (2, 128)).clip(0, 5.5), jnp.float32)
    ids = jnp.asarray(rng.choice(np.frombuffer(b"ab cde, f", np.uint8), (2, 128)).astype(np.int32) + 4)
    segments = jnp.ones((2, 128), jnp.int32).at[1, 90:].set(0)
    return ids, entropies, segments


OTHERS = [
    {"mode": "greedy", "threshold": 4.0},
    {"mode": "entropy", "threshold": 1.0},
    {"mode": "entropy", "threshold": 0.2, "monotonic": True},
    {"mode": "entropy", "threshold": 0.5, "threshold_add": 0.3},
    {"mode": "space"},
    {"mode": "static", "patch_size": 3},
    {"mode": "byte"},
    {"mode": "length_constrained", "threshold": 1.0, "num_patches": 16},
]


@pytest.mark.slow(days=21)
@pytest.mark.parametrize("options", OTHERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_no_other_mode_costs_less(long, options):
    """Exactly, not nearly: costs are sums of integers. All obey the same limits (the least length is 1)."""
    limits = {"max_length": 7, "block_size": 64}
    best = PatcherConfig(mode="optimal", threshold=1.0, patch_cost=0.8, **limits)
    _, least = run(best, best, *long)
    _, other = run(PatcherConfig(**options, **limits), best, *long)
    assert (np.asarray(least) <= np.asarray(other)).all()
    assert (np.asarray(least) > 0).sum() == 4
    assert (np.asarray(least) < np.asarray(other)).any()


@pytest.mark.slow(days=28, group="costly")
def test_without_limits_a_patch_ends_where_it_saves_more_than_it_costs(long):
    config = PatcherConfig(mode="optimal", threshold=1.0, patch_cost=0.8, block_size=64)
    patches, _ = run(config, config, *long)
    ids, entropies, segments = (np.asarray(x) for x in long)
    at = np.arange(128)
    inside = (np.pad(segments, ((0, 0), (0, 1)))[:, 1:] > 0) & (at % 64 != 63)
    expected = ((entropies > 1.8) & inside) | ((at % 64 == 63) & (segments > 0))
    np.testing.assert_array_equal(np.asarray(patches.closed).reshape(ids.shape), expected)


def test_costs_of_one_more_patch_fall_to_the_optimum(long):
    """The optimum over the number of patches is the least of the optima with that number fixed."""
    free = PatcherConfig(mode="optimal", threshold=0.5, patch_cost=0.9, max_length=12, block_size=64)
    patches, least = run(free, free, *long)
    number = int((patches.lengths[0, 0] > 0).sum())
    fixed = dataclasses.replace(free, mode="length_constrained", num_patches=number)
    _, cost = run(fixed, free, *long)
    assert float(cost[0, 0]) == float(least[0, 0])


def test_errors():
    config = PatcherConfig(mode="optimal", threshold=1.0, block_size=SIZE)
    patches, _ = run(config, config, IDS, ENTROPIES, SEGMENTS)
    with pytest.raises(ValueError, match="blocks of 24 bytes, patches of 14"):
        segmentation_cost(dataclasses.replace(config, block_size=24), patches, ENTROPIES)
    with pytest.raises(ValueError, match="calibrate_threshold"):
        make_patches(PatcherConfig(mode="optimal"), IDS, entropies=ENTROPIES)
    assert not config.causal
