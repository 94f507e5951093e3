"""The rules and limits that the tests of patching combine: a pair for each rule always, the others in turn."""

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
EACH_DAY = [
    ("entropy", "free"), ("monotonic", "max"), ("dual", "slots"), ("greedy", "slots"), ("space", "min"),
    ("static", "slots"), ("byte", "equal"),
]  # fmt: skip
"""One a rule."""


def turns(rule: str, limit: str) -> list[pytest.MarkDecorator]:
    """The tests take the same turn, and share its program."""
    if (rule, limit) in EACH_DAY:
        return []
    group = "pairs of rules and limits" if (rule, limit) in PAIRS else "other rules and limits"
    return [pytest.mark.slow(days=28, group=group, turn=f"{rule} {limit}")]


EVERY = [pytest.param(rule, limit, marks=turns(rule, limit)) for rule in RULES for limit in LIMITS]


@functools.cache
def config_of(rule: str, limit: str) -> PatcherConfig:
    return PatcherConfig(**RULES[rule], **LIMITS[limit], block_size=SIZE)
