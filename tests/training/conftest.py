"""These tests fit the same few recipes again and again, each run a few steps long."""

import grp
import pwd
from collections.abc import Iterator
from typing import Any

import pytest

from tests.compiled import compiled_once_and_quickly


@pytest.fixture(autouse=True, scope="module")
def _compiled_once_and_quickly(compiled: str) -> Iterator[None]:
    with compiled_once_and_quickly(compiled):
        yield


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No user and no group has a name, as in a container that runs under a number."""

    def unknown(number: int) -> Any:
        raise KeyError(f"uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(grp, "getgrgid", unknown)
