"""Being asked to stop: a flag set by signals, and the agreement of all processes."""

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.training.closed_terminal import leave_closed_terminal

Handler = Callable[[int, FrameType | None], Any] | int | None

SAME_REQUEST_S = 0.1
"""Signals closer together than this are one request: a launcher and its process group deliver each more than once."""
LAST_REQUEST = 3
"""The request that ends the process at once."""


class Vote:
    """Numbers that all processes agree on: of each the largest that one of them named.

    With several processes an answer is that of the call before. It is ready when the step before is, so nothing waits
    for the step that was just handed over. All call it at every step.
    """

    def __init__(self) -> None:
        self._asked: jax.Array | None = None
        devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
        self._mesh = Mesh(devices, ("processes", "devices"))

    def __call__(self, *numbers: int) -> tuple[int, ...]:
        """Name this process's numbers, which are at least 0, and return those of all; 0 where none was asked yet."""
        if jax.process_count() == 1:
            return numbers
        asked, self._asked = self._asked, self._ask(numbers)
        return (0,) * len(numbers) if asked is None else tuple(map(int, np.asarray(asked)))

    def _ask(self, numbers: tuple[int, ...]) -> jax.Array:
        """Hand the devices the question: they answer it in turn, behind what they were handed before."""
        mine, rows = np.asarray(numbers, np.int32)[None], PartitionSpec("processes")
        with jax.set_mesh(self._mesh):
            asked = multihost_utils.host_local_array_to_global_array(mine, self._mesh, rows)
            return _largest(asked, NamedSharding(self._mesh, PartitionSpec()))


@partial(jax.jit, static_argnums=1)
def _largest(rows: jax.Array, everywhere: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.max(rows, 0), everywhere)


def end_process(number: int) -> None:
    """End the process as the signal does where nothing catches it: an exception would wait for a save."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class StopRequest:
    """Catches signals inside a `with` block, so that a loop can save and leave at a step boundary.

        with StopRequest() as stop:
            for step in range(steps):
                ...
                if stop.here:
                    save(); break

    The first request raises a flag. The second changes nothing: schedulers and process groups send several. The third
    ends the process at once, unsaved. Signals within `SAME_REQUEST_S` of one that was counted belong to it.
    Outside the main thread no signal can be caught; the flag then stays down unless `set` is called.

    Args:
      signals: by default SIGTERM, which schedulers send before they kill, SIGINT, which is Ctrl-C, and SIGHUP, which
        a terminal sends when it closes. SIGHUP is left alone where it is ignored, as under nohup.
      clock: seconds, to tell requests apart.
      end: what the third request does, given its signal.
    """

    def __init__(
        self,
        *,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = end_process,
    ) -> None:
        self.signals = signals
        self._clock, self._end = clock, end
        # A plain bool: a lock could be held by the very code that a signal interrupts.
        self._asked = False
        self._requests, self._counted_at = 0, -np.inf
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._on_signal)
                for number in self.signals
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # None: set by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if number == signal.SIGHUP:
            # Leave the terminal now: the next line of the log would fail, and with it the run, before it is saved
            leave_closed_terminal()
        now = self._clock()
        if now - self._counted_at < SAME_REQUEST_S:
            return
        self._requests, self._counted_at = self._requests + 1, now
        if self._requests >= LAST_REQUEST:
            self._end(number)

    def set(self) -> None:
        """Raise the flag of this process, as a signal would."""
        self._asked = True

    @property
    def here(self) -> bool:
        """The flag of this process; `Vote` asks the others."""
        return self._asked
