import os
import signal
import threading
from collections.abc import Iterator

import pytest

from jaxblt.training.preemption import StopRequest


@pytest.fixture
def before() -> Iterator[list[int]]:
    """A handler of the caller's own, and the signals it got."""
    got: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, previous)


def test_a_signal_raises_the_flag_and_the_old_handler_comes_back(before: list[int]) -> None:
    mine = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.agreed(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.here
        assert stop.agreed(1)
        assert before == []
        assert signal.getsignal(signal.SIGTERM) is mine
        os.kill(os.getpid(), signal.SIGTERM)
        assert before == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine


def test_an_error_inside_puts_the_old_handler_back_too(before: list[int]) -> None:
    mine = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        with StopRequest():
            assert signal.getsignal(signal.SIGTERM) is not mine
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_other_signals_and_a_flag_by_hand(before: list[int]) -> None:
    with StopRequest(signals=(signal.SIGUSR1,)) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (before, stop.here) == ([signal.SIGTERM], False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.here
    with StopRequest() as stop:
        stop.set()
        assert stop.agreed(5)


def test_outside_the_main_thread_no_handler_is_touched(before: list[int]) -> None:
    mine, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM) is mine, stop.here))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


def test_the_interval_is_at_least_one_step() -> None:
    with pytest.raises(ValueError, match="every=0"):
        StopRequest(every=0)
