import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.patching import (
    PatcherConfig,
    bytes_per_patch,
    calibrate_capacity,
    calibrate_cut,
    calibrate_threshold,
    patches_per_block,
    threshold_margin,
)
from jaxblt.patching.patches import count_wanted
from jaxblt.patching.segment import closes
from tests.patching.cases import patch
from tests.patching.rows import random_rows

BLOCK = 256


def measure(config, entropies, segments):
    return patch(config, jnp.zeros(entropies.shape, jnp.int32), segment_ids=segments, entropies=entropies)


@pytest.fixture(scope="module")
def sample():
    rng = np.random.default_rng(2)
    entropies = rng.gamma(1.3, 1.0, (4, 16 * BLOCK)).clip(0, 5.5).astype(np.float32)
    segments = np.ones(entropies.shape, np.int32)
    segments[2, 9 * BLOCK - 40 :] = 0
    return entropies, segments


@pytest.mark.slow(days=21)
@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, 4.5),
        ({"monotonic": True}, 3.0),
        ({"threshold_add": 0.2}, 6.0),
        ({"mode": "greedy"}, 4.5),
        ({"min_length": 2, "max_length": 12}, 6.0),
    ],
)
def test_the_target_is_met(sample, options, target):
    entropies, segments = sample
    config = PatcherConfig(block_size=BLOCK, **options)
    threshold = calibrate_threshold(entropies, target, config=config, segment_ids=segments)
    found = dataclasses.replace(config, threshold=threshold)
    patches = measure(found, entropies, segments)
    assert abs(float(bytes_per_patch(patches)) - target) < 0.005 * target


def test_scores_above_the_cut_end_patches_of_the_target(sample):
    """Limits count: without them such a share of bytes would be 1/4, and not more."""
    scores, segments = sample
    config = PatcherConfig(mode="learned", block_size=BLOCK, min_length=2, max_length=12)
    cut = calibrate_cut(scores, 4.0, config=config, segment_ids=segments)
    p = np.where(scores > cut, 1.0, 0.0).astype(np.float32)
    assert p[segments > 0].mean() > 0.25
    assert abs(float(bytes_per_patch(measure(config, p, segments))) - 4.0) < 0.005 * 4.0


def test_scores_that_cannot_be_parted_are_refused(sample):
    learned = PatcherConfig(mode="learned", block_size=BLOCK)
    with pytest.raises(ValueError, match=r"all scores of the sample are 0.5, and no threshold parts them"):
        calibrate_cut(np.full((1, BLOCK), 0.5), 4.0, config=learned)
    with pytest.raises(ValueError, match=r"calibrate_cut is for mode='learned', got 'entropy'"):
        calibrate_cut(sample[0], 4.0, config=PatcherConfig())


def test_the_nearer_side_of_a_step():
    """Entropies take two values, so only three lengths can be had: the nearest one is."""
    entropies = np.tile(np.float32([1, 2, 2, 2]), 64)
    config = PatcherConfig(block_size=256)
    assert 1.0 <= calibrate_threshold(entropies, 1.4, config=config) < 2.0  # 193 patches: 1.33
    assert calibrate_threshold(entropies, 1.1, config=config) < 1.0  # 256 patches: 1.00


def test_a_target_out_of_reach_names_the_range(sample):
    config = PatcherConfig(block_size=BLOCK, max_length=8)
    with pytest.raises(ValueError, match=r"9 bytes per patch is out of reach.*gives 1 to 7\.\d+"):
        calibrate_threshold(sample[0], 9, config=config)
    with pytest.raises(ValueError, match="out of reach"):
        calibrate_threshold(sample[0], 2, config=dataclasses.replace(config, min_length=3))


def test_errors(sample):
    with pytest.raises(ValueError, match="holds no bytes"):
        calibrate_threshold(sample[0], 4, config=PatcherConfig(), segment_ids=np.zeros_like(sample[1]))


@pytest.mark.slow(days=28, group="costly")
def test_capacity(sample):
    entropies, segments = sample
    config = PatcherConfig(block_size=BLOCK, threshold=2.0)
    counts = np.asarray(patches_per_block(measure(config, entropies, segments)))
    capacity = calibrate_capacity(counts, block_size=BLOCK, quantile=0.9)
    assert capacity % 8 == 0
    limited = measure(dataclasses.replace(config, capacity=capacity), entropies, segments)
    full = counts > 0
    assert full.sum() == 57
    assert (np.asarray(limited.overflow)[full] > 0).mean() <= 0.1
    # Refused boundaries count, so that a sample measured with too few slots gives the same answer.
    small = measure(dataclasses.replace(config, capacity=8), entropies, segments)
    np.testing.assert_array_equal(patches_per_block(small)[:2], counts[:2])


def test_patches_are_counted_as_they_are_made():
    config = PatcherConfig(mode="entropy", threshold=4.0, block_size=16)
    ids, entropies, segments = (jnp.asarray(x) for x in random_rows(0, 3, 5, 16))
    made = patches_per_block(patch(config, ids, segment_ids=segments, entropies=entropies))
    counted = count_wanted(closes(config, ids, entropies, segments), segments, block_size=16)
    np.testing.assert_array_equal(counted, made)
    assert len(np.unique(made)) > 3


def test_capacity_is_a_multiple_and_at_most_the_block():
    counts = np.array([0, 0, 10, 17, 20])
    assert calibrate_capacity(counts, block_size=64, quantile=1.0) == 24
    assert calibrate_capacity(counts, block_size=64, quantile=0.5) == 24
    assert calibrate_capacity(counts, block_size=64, quantile=0.0) == 16
    assert calibrate_capacity(counts, block_size=20, quantile=1.0) == 20


@pytest.mark.parametrize(
    ("count", "options"),
    [
        *((200, {}), (200, {"monotonic": True})),
        *(
            pytest.param(count, options, marks=pytest.mark.slow(days=28, group="costly"))
            for count, options in ((5000, {}), (200, {"max_length": 12}), (200, {"mode": "greedy"}))
        ),
    ],
)
def test_the_threshold_keeps_its_distance_from_the_sample(count, options):
    """Every decision of the sample stands when all entropies are off by what rounding makes of them."""
    entropies = np.random.default_rng(count).gamma(1.3, 1.0, (1, count)).clip(0, 5.5).astype(np.float32)
    config = PatcherConfig(block_size=BLOCK, **options)
    threshold = calibrate_threshold(entropies, 4.5, config=config)
    found = dataclasses.replace(config, threshold=threshold)
    margin = threshold_margin(entropies, config=found)
    assert margin > 1 / (10 * count), "half of a gap is about 1 / count"
    before = np.asarray(measure(found, entropies, np.ones((1, count), np.int32)).closed)
    for error in (-0.9 * margin, 0.9 * margin):
        moved = (entropies + np.float32(error)).astype(np.float32)
        if not options.get("monotonic"):
            after = measure(found, moved, np.ones((1, count), np.int32))
            np.testing.assert_array_equal(np.asarray(after.closed), before)


def test_values_that_rounding_split_are_not_told_apart():
    """A few contexts that recur: the nearest mean length would part copies of one entropy from each other."""
    rng = np.random.default_rng(3)
    entropies = (rng.integers(1, 9, (1, 2000)) / 2 + rng.normal(0, 1e-6, (1, 2000))).astype(np.float32)
    config = PatcherConfig(block_size=BLOCK)
    threshold = calibrate_threshold(entropies, 3.7, config=config)
    found = dataclasses.replace(config, threshold=threshold)
    assert threshold_margin(entropies, config=found) > 0.2
