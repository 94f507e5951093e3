"""The user's cache, and what stands in for it where there is none."""

import atexit
import os
import pwd
import tempfile
from functools import partial

import pytest

from jaxblt.remote import cache, user_cache


@pytest.fixture
def fresh():
    cache._make_stand_in.cache_clear()
    yield
    cache._make_stand_in.cache_clear()


def nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")


@pytest.mark.parametrize("home", [None, "/proc/1"])
def test_without_a_home_to_write_to_the_cache_is_temporary_and_this_is_said_once(
    fresh, home, monkeypatch, caplog, tmp_path
):
    """As under `docker --user` and `runAsUser`: no HOME and no entry in passwd, or a HOME of somebody else's."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    at_exit = []
    monkeypatch.setattr(
        atexit, "register", lambda *call, **options: at_exit.append(partial(*call, **options))
    )
    monkeypatch.delenv("HOME", raising=False) if home is None else monkeypatch.setenv("HOME", home)
    first, second = user_cache("compiled"), user_cache("remote")
    assert (first.name, second.name) == ("compiled", "remote")
    assert first.parent == second.parent
    assert os.access(first, os.W_OK)
    (said,) = caplog.messages
    assert said.startswith(f"no cache can be kept in {home or '~'}/.cache: it is {first.parent} until")
    (remove,) = at_exit
    remove()
    assert list(tmp_path.iterdir()) == []
