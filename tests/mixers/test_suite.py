"""Every mixer has every property: all of them for three mixers, the rest of the matrix where it differs or is slow."""

import functools

import pytest

from jaxblt.testing import PROPERTIES, Property, Subject
from jaxblt.testing.numerics import check_sharded
from tests.mixers.configs import ALL, FULL, PART


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> Subject:
    return Subject(ALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", FULL)
def test_sharded_over_fewer_devices(name: str, count: int) -> None:
    check_sharded(subject_of(name), counts=(count,))


def cases() -> list:
    pairs = []
    for name, config in ALL.items():
        for prop in PROPERTIES:
            if prop.applies(config):
                always = name in FULL or prop.name in PART[name][1]
                marks = () if always else (pytest.mark.slow(weekly=2),)
                pairs.append(pytest.param(name, prop, id=f"{name}-{prop.name}", marks=marks))
    return pairs


@pytest.mark.parametrize(("name", "prop"), cases())
def test_property(name: str, prop: Property) -> None:
    prop.check(subject_of(name))
