"""Silence of what a failed read leaves behind: Orbax closes its event loop under reads that still go on."""

import functools
import logging
import sys
import traceback
import warnings
from types import CoroutineType
from typing import Any


@functools.cache
def silence_leftovers() -> None:
    """Keep reads that go on behind a failed one from printing a page each, from the first call on.

    On a busy machine the last of them ends long after the error was handled. All else is printed as before.
    """
    printed, ignored = sys.excepthook, sys.unraisablehook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not _is_closed_loop(error):
            printed(kind, error, trace)

    def unraisablehook(found: Any) -> None:
        # Hand Ctrl-C on: the hook of commands repeats it
        interrupted = isinstance(found.exc_value, KeyboardInterrupt)
        if interrupted or not (_is_closed_loop(found.exc_value) or _is_of_orbax(found.object)):
            ignored(found)

    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
    logging.getLogger("asyncio").addFilter(_is_of_others)
    warnings.filterwarnings("ignore", "coroutine '_read_.*' was never awaited", RuntimeWarning)


def _is_closed_loop(error: Any) -> bool:
    """Tell whether a loop was told of bytes after its end: only the loop's own frames lead there."""
    return (
        isinstance(error, RuntimeError)
        and str(error) == "Event loop is closed"
        and all(_is_of_loops(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    )


def _is_of_loops(file: str) -> bool:
    return "asyncio" in file or "uvloop" in file


def _is_of_orbax(found: Any) -> bool:
    return isinstance(found, CoroutineType) and "orbax" in found.cr_code.co_filename


def _is_of_others(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    left = "exception was never retrieved" in message or "was destroyed but it is pending" in message
    return not (left and any(word in message for word in ("orbax", "TensorStore", "OCDBT")))
