"""Being asked to stop: a flag set by signals, and agreement of all processes on when."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

Handler = Callable[[int, FrameType | None], Any] | int | None

SAME_REQUEST_S = 0.1
"""Signals closer together than this are one request: a launcher and its process group deliver each more than once."""
LAST_REQUEST = 3
"""The request that ends the process at once."""


def agreed(asked: bool, step: int, every: int) -> bool:
    """Whether any process asks; all must call it with the same `step`, for one answer.

    Several processes ask each other only at steps that are a multiple of `every`. Asking waits for the devices, so
    take the interval at which metrics are read anyway.
    """
    if jax.process_count() == 1:
        return asked
    if step % every:
        return False
    return bool(np.any(multihost_utils.process_allgather(np.asarray(asked))))


def end_process(number: int) -> None:
    """Ends the process as the signal does where nothing catches it: an exception would wait for a save on its way."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class StopRequest:
    """Catches signals inside a `with` block, so that a loop can save and leave at a step boundary.

        with StopRequest() as stop:
            for step in range(steps):
                ...
                if stop.agreed(step):
                    save(); break

    The first request raises a flag. The second changes nothing: schedulers and process groups send several. The third
    ends the process at once, unsaved. Signals within `SAME_REQUEST_S` of one that was counted belong to it.
    Outside the main thread no signal can be caught; the flag then stays down unless `set` is called.

    Args:
      signals: by default SIGTERM, which schedulers send before they kill, and SIGINT, which is Ctrl-C.
      every: with several processes, ask the others only at steps that are a multiple of it, see `agreed`.
      clock: seconds, to tell requests apart.
      end: what the third request does, given its signal.
    """

    def __init__(
        self,
        *,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT),
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = end_process,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: expected at least 1 step")
        self.signals, self.every = signals, every
        self._clock, self._end = clock, end
        # A plain bool: a lock could be held by the very code that a signal interrupts.
        self._asked = False
        self._requests, self._counted_at = 0, -np.inf
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in self.signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # None: set by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        now = self._clock()
        if now - self._counted_at < SAME_REQUEST_S:
            return
        self._requests, self._counted_at = self._requests + 1, now
        if self._requests >= LAST_REQUEST:
            self._end(number)

    def set(self) -> None:
        """Raises the flag of this process, as a signal would."""
        self._asked = True

    @property
    def here(self) -> bool:
        """Whether this process was asked to stop."""
        return self._asked

    def agreed(self, step: int) -> bool:
        """Whether any process was asked to stop; all must call it with the same `step`, for one answer."""
        return agreed(self.here, step, self.every)
