"""These tests fit the same few recipes again and again, each run a few steps long."""

from collections.abc import Iterator

import pytest

from tests.compiled import compiled_once_and_quickly


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for this process's programs."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True, scope="module")
def _compiled_once_and_quickly(compiled: str) -> Iterator[None]:
    with compiled_once_and_quickly(compiled):
        yield
