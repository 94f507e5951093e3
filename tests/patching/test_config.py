import dataclasses

import pytest

from jaxblt.patching import PatcherConfig


def test_no_default_threshold():
    with pytest.raises(ValueError, match="calibrate_threshold"):
        PatcherConfig().known_threshold()
    assert dataclasses.replace(PatcherConfig(), threshold=1.25).known_threshold() == 1.25


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, 4096),
        ({"capacity": 1024}, 1024),
        ({"min_length": 3}, 1366),
        ({"mode": "static", "patch_size": 6}, 683),
        ({"mode": "static", "patch_size": 8, "max_length": 4}, 4096),
        ({"mode": "length_constrained", "num_patches": 700}, 700),
    ],
)
def test_slots_are_the_capacity_or_the_least_that_cannot_overflow(options, slots):
    assert PatcherConfig(**options).slots == slots


def test_causal_modes():
    causal = ("entropy", "greedy", "space", "static", "byte")
    assert all(PatcherConfig(mode=mode).causal for mode in causal)
    assert not PatcherConfig(mode="optimal").causal
    assert not PatcherConfig(mode="length_constrained", num_patches=512).causal
