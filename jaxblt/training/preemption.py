"""Being asked to stop: a flag set by a signal, and agreement of all processes on when."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

Handler = Callable[[int, FrameType | None], Any] | int | None


class StopRequest:
    """Catches signals inside a `with` block, so that a loop can save and leave at a step boundary.

        with StopRequest() as stop:
            for step in range(steps):
                ...
                if stop.agreed(step):
                    save(); break

    The first signal sets a flag and puts the previous handler back: a second one ends the process as ever.
    Outside the main thread no signal can be caught; the flag then stays down unless `set` is called.

    Args:
      signals: SIGTERM by default, which schedulers send before they kill; SLURM can send others.
      every: with several processes, ask the others only at steps that are a multiple of it. Asking waits for
        the devices, so take the interval at which metrics are read anyway.
    """

    def __init__(self, *, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,), every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every}: expected at least 1 step")
        self.signals, self.every = signals, every
        self._flag = threading.Event()
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in self.signals}
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._put_back()
        self._flag.set()

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            # None: set by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def set(self) -> None:
        """Raises the flag of this process, as a signal would."""
        self._flag.set()

    @property
    def here(self) -> bool:
        """Whether this process was asked to stop."""
        return self._flag.is_set()

    def agreed(self, step: int) -> bool:
        """Whether any process was asked to stop; all must call it with the same `step`, for one answer."""
        if jax.process_count() == 1:
            return self.here
        if step % self.every:
            return False
        return bool(np.any(multihost_utils.process_allgather(np.asarray(self.here))))
