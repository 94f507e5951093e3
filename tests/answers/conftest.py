"""These tests read a few records with each of a few programs."""

from collections.abc import Iterator

import pytest

from tests.answers.runs import BYTES, make_run, patched_run
from tests.compiled import compiled_once_and_quickly


@pytest.fixture(autouse=True, scope="package")
def _compiled_once_and_quickly(compiled: str) -> Iterator[None]:
    with compiled_once_and_quickly(compiled):
        yield


@pytest.fixture(scope="package")
def runs():
    """A byte language model of Hyena and attention, and a byte-patched model that an entropy model cuts for."""
    return {"bytes": make_run(BYTES), "patches": patched_run()}


@pytest.fixture(params=["bytes", "patches"])
def run(request, runs):
    return runs[request.param]
