"""Ctrl-C as a quiet end of a command, also while its modules are imported."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

AGAIN_S = 0.1
"""Seconds after which an interrupt that Python dropped is repeated."""
IMPORTS = "<frozen importlib"
"""Beginning of the file names of Python's own import system."""


def end_quietly() -> None:
    """Let Ctrl-C end this process without a word while a module is imported.

    Elsewhere it raises KeyboardInterrupt as ever. Inside an import, extensions turn that error into others.
    """
    # Leave it ignored where a shell has said so, as of a job in the background
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = functools.partial(_ask_again, sys.unraisablehook)


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
