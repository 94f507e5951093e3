"""Every mixer has every property: each run those that matter most, and of the rest of the matrix a sample."""

import functools

import pytest

from jaxblt.testing import PROPERTIES, Property, Subject
from jaxblt.testing.numerics import check_sharded
from tests.mixers.configs import ALL, FULL, NAIVE, OF_DRIVER, VARIANTS

EVERY_DAY = ("output", "causal", "mixes", "packed", "batch")
"""What runs a mixer's parallel program; of variants and relatives in turn."""

STREAMED_AND_DIFFERENTIATED = (
    *("chunked", "documents_streamed", "holes_streamed", "rows_advance_alone", "keep", "state"),
    *("holes", "finite_gradients", "every_parameter"),
)
"""What runs two programs more: each run of those in `STREAMED`, of others in turns."""

STREAMED = ("attention", "hyena_modal", "naive_steps", "naive_both")
"""Mixers that stream by code of their own. All others leave it to the driver, as "naive" does."""

OWN = {"naive_steps": ("gathers",), "naive_both": ("long",)}
"""Properties that run code which those of "naive" do not."""

IN_TURNS = ("sharded", "gradients")
"""In turns of all mixers but "naive", which has every property each run: others of the driver run the same code."""


def further(name: str) -> pytest.MarkDecorator:
    """What compiles programs of its own: all of a mixer on one day, one or two mixers a day."""
    return pytest.mark.slow(days=28, group="further properties of mixers", turn=name)


def in_turns(name: str) -> pytest.MarkDecorator:
    """What a mixer is checked for on most days."""
    return pytest.mark.slow(days=28, group="streams, shards and gradients of mixers", turn=name)


def of_variant(name: str) -> pytest.MarkDecorator:
    """A variant of another mixer comes with all that runs the same programs."""
    return pytest.mark.slow(days=28, group="variants of mixers", turn=name)


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> Subject:
    return Subject((ALL | OF_DRIVER)[name])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", [pytest.param(name, marks=further(name)) for name in FULL])
def test_sharded_over_fewer_devices(name: str, count: int) -> None:
    check_sharded(subject_of(name), counts=(count,))


RELATIVES = (
    *("sparse_attention", "minlstm", "ntm", "state_engine"),
    *("attention_both", "hyena_modal_both", "hyena_implicit"),
    *("lstm", "gated_delta_net", "mamba2"),
)
"""Mixers whose loops tests of their own compare, each run or in turns, or which share the code of one that runs."""


def turns(name: str, prop: Property) -> tuple[pytest.MarkDecorator, ...]:
    """How a case takes turns with others; not at all if it runs each run."""
    if name not in NAIVE and prop.name not in EVERY_DAY + STREAMED_AND_DIFFERENTIATED + IN_TURNS:
        return (further(name),)
    if name in VARIANTS:
        return (of_variant(name),)
    if name in RELATIVES:
        return (in_turns(name),)
    each_run = EVERY_DAY + OWN.get(name, ()) + (STREAMED_AND_DIFFERENTIATED if name in STREAMED else ())
    return () if name == "naive" or prop.name in each_run else (in_turns(name),)


def cases() -> list:
    pairs = []
    for name, config in (ALL | OF_DRIVER).items():
        for prop in PROPERTIES:
            if prop.applies(config):
                pairs.append(pytest.param(name, prop, id=f"{name}-{prop.name}", marks=turns(name, prop)))
    return pairs


@pytest.mark.parametrize(("name", "prop"), cases())
def test_property(name: str, prop: Property) -> None:
    prop.check(subject_of(name))
