"""Named times, nested."""

from typing import Any

import jax.numpy as jnp
import pytest

from jaxblt.profiling import Timer
from jaxblt.profiling import timer as module


def test_times_nest_add_up_and_wait_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = iter([0.0, 1.0, 3.0, 4.0, 8.0, 10.0]), []
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(module.jax, "block_until_ready", waited.append)
    timer, x = Timer(), jnp.ones(2)
    with timer("step"):
        for _ in range(2):
            with timer("loss") as wait:
                wait.append(x)
    assert {path: (t.count, t.seconds) for path, t in timer.times.items()} == {
        "step": (1, 10.0),
        "step/loss": (2, 6.0),
    }
    assert [x] in waited
    assert timer.summary().splitlines()[-1].split() == ["step/loss", "2", "6.000", "60%"]


def test_a_block_that_fails_is_counted_and_closed() -> None:
    timer: Any = Timer()
    with pytest.raises(RuntimeError), timer("a"):
        raise RuntimeError
    with timer("b"):
        pass
    assert list(timer.times) == ["a", "b"]
    with (
        pytest.raises(ValueError, match="a block's name must be a word without '/', got 'a/b'"),
        timer("a/b"),
    ):
        pass
