"""Benchmarks on one device take turns."""

import fcntl

import pytest

from pallas_kernels._alone import LOCK, alone


def test_the_file_is_held_inside_and_free_after(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    monkeypatch.setenv(LOCK, str(path))
    with path.open("a") as other:

        def taken() -> bool:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            fcntl.flock(other, fcntl.LOCK_UN)
            return False

        assert not taken()
        with alone():
            with alone():
                assert taken()
            assert taken()
        assert not taken()
        with pytest.raises(ArithmeticError), alone():
            raise ArithmeticError
        assert not taken()


def test_without_a_file_nothing_is_held(tmp_path, monkeypatch):
    monkeypatch.delenv(LOCK, raising=False)
    monkeypatch.chdir(tmp_path)
    with alone():
        assert not list(tmp_path.iterdir())
