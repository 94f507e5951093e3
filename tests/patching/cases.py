"""The rules and limits that the tests of patching combine: pairs of them always, every combination when
slow."""

import functools

import jax
import pytest

from jaxblt.patching import PatcherConfig, make_patches

SIZE = 24
patch = jax.jit(make_patches, static_argnums=0)

RULES = {
    "entropy": {"mode": "entropy", "threshold": 3.5},
    "monotonic": {"mode": "entropy", "threshold": 0.5, "monotonic": True},
    "dual": {"mode": "entropy", "threshold": 2.0, "threshold_add": 0.25},
    "greedy": {"mode": "greedy", "threshold": 7.0},
    "space": {"mode": "space"},
    "static": {"mode": "static", "patch_size": 5},
    "byte": {"mode": "byte"},
}
LIMITS = {
    "free": {},
    "max": {"max_length": 3},
    "min": {"min_length": 4},
    "both": {"min_length": 2, "max_length": 5},
    "equal": {"min_length": 4, "max_length": 4},
    "slots": {"max_length": 4, "capacity": 5},
}
PAIRS = [
    ("entropy", "free"), ("entropy", "both"), ("entropy", "slots"), ("monotonic", "max"), ("monotonic",
    "both"), ("dual", "max"), ("dual", "both"), ("dual", "slots"), ("greedy", "free"), ("greedy", "both"),
    ("space", "min"), ("space", "both"), ("static", "slots"), ("static", "both"), ("byte", "equal"),
]  # fmt: skip
EVERY = [
    pytest.param(rule, limit, marks=[] if (rule, limit) in PAIRS else [pytest.mark.slow(weekly=1)])
    for rule in RULES
    for limit in LIMITS
]


@functools.cache
def config_of(rule: str, limit: str) -> PatcherConfig:
    return PatcherConfig(**RULES[rule], **LIMITS[limit], block_size=SIZE)
