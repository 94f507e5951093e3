import os
import signal
import subprocess
import sys
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_request_raises_the_flag_and_the_third_ends(before: list[int], number: int) -> None:
    """The second changes nothing; signals that come together are one request."""
    mine, now, ended = signal.getsignal(number), [0.0], []
    with StopRequest(clock=lambda: now[0], end=ended.append) as stop:
        assert not stop.here
        for now[0] in (5.0, 5.05, 5.09, 5.2, 5.25):
            os.kill(os.getpid(), number)
            assert stop.here
            assert (before, ended) == ([], [])
        now[0] = 5.4
        os.kill(os.getpid(), number)
        assert (before, ended) == ([], [number])
    assert signal.getsignal(number) is mine


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.here
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.slow(days=28, group="processes of their own")
def test_the_third_request_ends_a_process_as_the_signal_does() -> None:
    """Though it holds an exception back for ever, and its own handlers too."""
    script = """
import os, signal, time
from jaxblt.training.preemption import StopRequest
with StopRequest():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        print("lives", flush=True)
        os.kill(os.getpid(), number)
        time.sleep(0.2)
    print("outlived the third", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (-signal.SIGINT, ["lives"] * 3), done.stderr


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
        assert stop.here


def test_outside_the_main_thread_no_handler_is_touched(before: list[int]) -> None:
    mine, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM) is mine, stop.here))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)]
