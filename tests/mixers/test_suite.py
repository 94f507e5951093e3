"""Every mixer has every property: each week those that matter most, and of the rest of the matrix a sample."""

import functools

import pytest

from jaxblt.testing import PROPERTIES, Property, Subject
from jaxblt.testing.numerics import check_sharded
from tests.mixers.configs import ALL, FULL, PART

EVERY_WEEK = ("causal", "packed", "chunked", "sharded", "gradients")
"""What every mixer is checked for each week."""

SAME_PROGRAMS = (
    *("output", "mixes", "holes", "batch"),
    *("documents_streamed", "holes_streamed", "rows_advance_alone", "state"),
    *("finite_gradients", "every_parameter"),
)
"""What runs the programs that those have compiled, and costs little more."""

OWN_PROGRAMS = pytest.mark.slow(weekly=8, group="properties that a mixer's own code bears on")
FAR_AWAY = pytest.mark.slow(weekly=2)


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> Subject:
    return Subject(ALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", FULL)
def test_sharded_over_fewer_devices(name: str, count: int) -> None:
    check_sharded(subject_of(name), counts=(count,))


def turns(name: str, prop: Property) -> tuple[pytest.MarkDecorator, ...]:
    """How a case takes turns with others; not at all if it runs each week."""
    if prop.name in EVERY_WEEK + SAME_PROGRAMS:
        return ()
    return (OWN_PROGRAMS if name in FULL or prop.name in PART[name][1] else FAR_AWAY,)


def cases() -> list:
    pairs = []
    for name, config in ALL.items():
        for prop in PROPERTIES:
            if prop.applies(config):
                pairs.append(pytest.param(name, prop, id=f"{name}-{prop.name}", marks=turns(name, prop)))
    return pairs


@pytest.mark.parametrize(("name", "prop"), cases())
def test_property(name: str, prop: Property) -> None:
    prop.check(subject_of(name))
