"""Tiny runs, whose programs all tests here share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxblt.mixers import HyenaConfig, ImplicitFilter
from jaxblt.models import ByteLMConfig, StackConfig
from tests.answers.runs import HEADS, make_run, patched_run
from tests.compiled import compiled_once_and_quickly
from tests.mixer_table import table

HYENA = HyenaConfig(dim=16, filter=ImplicitFilter(filter_len=64, width=8))
ONE = StackConfig(dim=16, num_layers=1, pattern="A", mlp_dim=24, mixers=table(attention=HEADS, hyena=HYENA))


class Made(dict[str, Any]):
    """Values by name, each made when a test first asks for it."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]


@pytest.fixture(autouse=True, scope="package")
def _compiled_once_and_quickly(compiled: str) -> Iterator[None]:
    with compiled_once_and_quickly(compiled):
        yield


@pytest.fixture(scope="package")
def runs():
    """A byte Transformer, a byte Hyena, and a byte-patched model that an entropy model cuts for."""
    hyena = StackConfig(dim=16, num_layers=1, pattern="H", mlp_dim=24, mixers=ONE.mixers)
    stacks = {"transformer": ONE, "hyena": hyena}
    return Made(
        lambda name: patched_run() if name == "patches" else make_run(ByteLMConfig(stack=stacks[name]))
    )
