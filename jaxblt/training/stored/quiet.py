"""Silence of what a failed read leaves behind: Orbax closes its event loop under reads that still go on."""

import gc
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CoroutineType
from typing import Any

READS = "orbax/checkpoint/_src/serialization"
"""Where Orbax reads arrays, many at once."""
WAIT_S = 5.0
"""The longest wait for reads that nobody needs any more."""
QUIET_S = 0.3
"""The wait behind the last of them: TensorStore tells the closed loop when its bytes arrive."""


@contextmanager
def silence_leftovers() -> Iterator[None]:
    """Raise what a block raises, and keep reads that go on behind it from printing a page each."""
    printed, ignored, tasks = sys.excepthook, sys.unraisablehook, logging.getLogger("asyncio")

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not _is_closed_loop(error):
            printed(kind, error, trace)

    def unraisablehook(found: Any) -> None:
        if not (_is_closed_loop(found.exc_value) or _is_of_orbax(found.object)):
            ignored(found)

    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
    tasks.addFilter(_is_retrieved)
    try:
        yield
    except Exception as error:
        _outlast(error)
        raise
    finally:
        sys.excepthook, sys.unraisablehook = printed, ignored
        tasks.removeFilter(_is_retrieved)


def _outlast(error: Exception) -> None:
    """Release the reads that the frames of an error of arrays hold, and wait for their end."""
    causes = list(_list_causes(error))
    if not any(
        READS in frame.filename for one in causes for frame in traceback.extract_tb(one.__traceback__)
    ):
        return
    for one in causes:
        traceback.clear_frames(one.__traceback__)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        gc.collect()
        if not any(_is_of_orbax(found) and found.cr_frame is not None for found in gc.get_objects()):
            break
        time.sleep(0.02)
    time.sleep(QUIET_S)


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_closed_loop(error: Any) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def _is_of_orbax(found: Any) -> bool:
    return isinstance(found, CoroutineType) and "orbax" in found.cr_code.co_filename


def _is_retrieved(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()
