"""Ctrl-C as a quiet end of a command, also while its modules are imported or XLA compiles its programs."""

import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

AGAIN_S = 0.1
"""Seconds after which an interrupt that Python dropped is repeated."""
IMPORTS = "<frozen importlib"
"""Beginning of the file names of Python's own import system."""
COMPILER = os.path.join("jax", "_src", "compiler.py")
"""End of the name of the file in which JAX waits for XLA to compile."""
ANSWER_S = 1.0
"""Seconds in which an interrupt may end the process; those within them are one, as a launcher sends several."""
POLL_S = 0.3
"""Seconds after which a wait for the next interrupt looks whether XLA has compiled."""
WAITING = "waiting for XLA to finish compiling; press Ctrl-C again to end now"


def end_quietly() -> None:
    """Let Ctrl-C end this process without a word while a module is imported.

    Elsewhere it raises KeyboardInterrupt as ever. Inside an import, extensions turn that error into others.
    """
    # Leave it ignored where a shell has said so, as of a job in the background
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = functools.partial(_ask_again, sys.unraisablehook)
        heard, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=_tell_of_compiling, args=(heard,), name="interrupts", daemon=True).start()


def _tell_of_compiling(heard: int) -> None:
    """Say what an interrupt waits for if XLA compiles, and end the process at the next one.

    Python handles signals in the main thread only, which may be inside XLA, or wait for a thread that is.
    """
    while signals := os.read(heard, 1):
        if signals[0] != signal.SIGINT:
            continue
        time.sleep(ANSWER_S)
        if select.select([heard], [], [], 0)[0]:
            os.read(heard, select.PIPE_BUF)
        if not _is_compiling():
            continue
        # Standard error may be closed, and None then
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{WAITING}\n")
            sys.stderr.flush()
        _end_at_next(heard)


def _end_at_next(heard: int) -> None:
    """End the process at the next interrupt, until XLA has compiled: a later one may come while a run is saved."""
    while _is_compiling():
        is_heard = select.select([heard], [], [], POLL_S)[0]
        # Look again: XLA may have compiled during the wait, and the run would end unsaved
        if is_heard and signal.SIGINT in os.read(heard, select.PIPE_BUF) and _is_compiling():
            os._exit(128 + signal.SIGINT)


def _is_compiling() -> bool:
    """Return whether a thread is inside XLA's compiler."""
    frames: list[FrameType | None] = list(sys._current_frames().values())
    return any(frame is not None and frame.f_code.co_filename.endswith(COMPILER) for frame in frames)


def _ask_again(
    otherwise: "Callable[[sys.UnraisableHookArgs], Any]", dropped: "sys.UnraisableHookArgs"
) -> None:
    """Interrupt once more, in a moment, where Python drops the exception: in finalizers and in callbacks of C.

    Other exceptions go to the hook `otherwise`.
    """
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        return otherwise(dropped)
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    try:
        again.start()
    except KeyboardInterrupt:
        # Python would drop what this function raises too
        _ask_again(otherwise, dropped)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTS):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt
