"""Taking turns on a device: benchmarks compile side by side and are timed one at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LOCK = "JAXBLT_BENCH_LOCK"
"""Environment variable with the path of a file; benchmarks that share a device name one file."""

_holding = ContextVar("holding", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Hold the file of `JAXBLT_BENCH_LOCK` alone, after a wait; do nothing where none is named.

    Inside another `alone` it holds the file already.
    """
    path = os.environ.get(LOCK)
    if path is None or _holding.get():
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        token = _holding.set(True)
        try:
            yield
        finally:
            _holding.reset(token)
