"""Ctrl-C as a quiet end of a command, also while its modules are imported."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType

AGAIN_S = 0.1
"""Seconds after which an interrupt that Python dropped is repeated."""
IMPORTS = "<frozen importlib"
"""Beginning of the file names of Python's own import system."""


def end_quietly() -> None:
    """Let Ctrl-C end this process without a word while a module is imported.

    Elsewhere it raises KeyboardInterrupt as ever. Inside an import, extensions turn that error into others.
    """
    sys.unraisablehook = _ask_again
    # Leave it ignored where a shell has said so, as of a job in the background
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _ask_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Interrupt once more, in a moment, where Python drops the exception: in finalizers and in callbacks of C."""
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        return sys.__unraisablehook__(dropped)
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    try:
        again.start()
    except KeyboardInterrupt:
        # Python would drop what this function raises too
        _ask_again(dropped)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTS):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt
