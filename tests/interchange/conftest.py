"""These tests write a byte model and a byte-patched one, neither of them trained, to files and read them back."""

from collections.abc import Iterator

import pytest

from tests.answers.runs import BYTES, make_run, patched_run
from tests.compiled import compiled_once_and_quickly


@pytest.fixture(autouse=True, scope="package")
def _compiled_once_and_quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once_and_quickly(str(tmp_path_factory.mktemp("compiled"))):
        yield


@pytest.fixture(scope="package")
def runs():
    """A byte language model of Hyena and attention, and a byte-patched model that an entropy model cuts for."""
    return {"bytes": make_run(BYTES), "patches": patched_run()}
