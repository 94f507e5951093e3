import dataclasses

import pytest

from jaxblt.patching import PatcherConfig


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "bpe"}, r"mode must be one of .*got 'bpe'"),
        ({"block_size": 0}, "block_size"),
        ({"min_length": 0}, r"min_length must lie in 1\.\.block_size = 4096, got 0"),
        ({"max_length": 5000}, "max_length must lie in"),
        ({"capacity": 0}, "capacity must lie in"),
        ({"min_length": 9, "max_length": 8}, "min_length 9 exceeds max_length 8"),
        ({"mode": "static", "patch_size": 0}, "patch_size"),
        ({"mode": "space", "monotonic": True}, "belong to mode='entropy'"),
        ({"mode": "greedy", "threshold_add": 0.1}, "belong to mode='entropy'"),
        ({"monotonic": True, "threshold_add": 0.1}, "not both"),
        ({"threshold": float("nan")}, "threshold must be a finite number"),
        ({"mode": "greedy", "threshold": -1.0}, "at least 0, got -1.0: nats, in mode='greedy'"),
        ({"mode": "optimal", "patch_cost": -1.0}, "patch_cost"),
        ({"num_patches": 4}, "length_constrained"),
        ({"mode": "length_constrained"}, "length_constrained"),
        ({"mode": "length_constrained", "num_patches": 3, "block_size": 64, "max_length": 16},
         r"choose num_patches in 4\.\.64"),
        ({"mode": "length_constrained", "num_patches": 20, "block_size": 64, "min_length": 4},
         r"choose num_patches in 1\.\.16"),
        ({"mode": "length_constrained", "num_patches": 8, "capacity": 7, "block_size": 64},
         "exceeds capacity"),
    ],
)  # fmt: skip
def test_errors(options, match):
    with pytest.raises(ValueError, match=match):
        PatcherConfig(**options)


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
