import errno
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxblt.training.closed_terminal import outliving_terminal
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


OUTLIVES = """
import fcntl, signal, sys, termios, time
from jaxblt.training.log.runlog import Progress
from jaxblt.training.preemption import StopRequest
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
ignores = sys.argv[1] == "ignores"
if ignores:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequest() as stop, Progress(9) as progress:
    progress.say("lives")
    while ignores or not stop.here:
        time.sleep(0.01)
        try:
            termios.tcgetattr(1)
        except termios.error:
            break
    progress.update(5, {"loss": 1.0})
    progress.say("saved")
    open(sys.argv[2], "w").write("saved")
"""


@pytest.mark.slow(days=28, group="processes of their own")
@pytest.mark.parametrize("hangup", ["stops", "ignores"])
def test_a_terminal_that_closes_is_no_error(hangup: str, tmp_path: Path) -> None:
    """The run is saved, and its process ends with status 0 as at SIGTERM; a run without SIGHUP goes on."""
    terminal, end = pty.openpty()
    words = [sys.executable, "-c", OUTLIVES, hangup, str(tmp_path / "saved")]
    run = subprocess.Popen(words, stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    said = b""
    while b"lives" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert run.wait(60) == 0
    assert (tmp_path / "saved").exists()


def test_a_terminal_that_was_left_meanwhile_is_no_error() -> None:
    """A line fails, and the handler of SIGHUP runs before the error is met; a full disk is another matter."""
    with outliving_terminal():
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="full"), outliving_terminal():
        raise OSError(errno.ENOSPC, "full")


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
