"""The bytes of a request on their way to its reader: held back before a stop string, joined into pieces."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from jaxblt.inference.engine.config import ARRAYS, TOP, Finish, Piece, Request, join_pieces


class Stream(Iterator[Piece]):
    """The pieces of a request, as they come; the last one says why it ended.

    Attributes:
      request: what was asked.
      finish: why it ended; None while it goes on.
      on_first: called, in a thread of the engine's, when the first bytes come.
    """

    def __init__(self, request: Request, cancel: Callable[["Stream"], None]) -> None:
        """Begin without pieces; `cancel` is called where the reader leaves."""
        self.request, self._cancel, self._begun = request, cancel, time.monotonic()
        self.on_first: Callable[[Stream], None] | None = None
        self.finish: Finish | None = None
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._notify: Callable[[], None] | None = None

    def __next__(self) -> Piece:
        """Wait for the next piece.

        Raises:
          ValueError: the logits are not finite.
          RuntimeError: the engine failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._ended)
        found = self.take()
        if not found:
            raise StopIteration
        return found

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    @property
    def _ended(self) -> bool:
        return self.finish is not None or self._error is not None

    def take(self) -> Piece | None:
        """Return all that waits as one piece, or None; raise as `__next__` does."""
        with self._changed:
            if not self._pieces:
                if self._error is not None:
                    raise self._error
                return None
            found = join_pieces(list(self._pieces))
            self._pieces.clear()
        return found

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun

    @property
    def unread(self) -> int:
        """Bytes that wait for the reader."""
        with self._changed:
            return sum(len(piece.data) for piece in self._pieces)

    def read(self) -> Piece:
        """Wait for the end, and return all that was not taken yet as one piece."""
        return join_pieces([empty_piece(self.finish), *self])

    def cancel(self) -> None:
        """End the request, unless it has ended."""
        self._cancel(self)

    def call(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each change, in a thread of the engine's, and once now."""
        self._notify = notify
        notify()

    def put(self, piece: Piece) -> None:
        """Hand over the next piece."""
        if piece.data and self.on_first is not None:
            self.on_first(self)
            self.on_first = None
        with self._changed:
            self._pieces.append(piece)
            self.finish = piece.finish
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def fail(self, error: Exception) -> None:
        """Hand over an error in place of a piece."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()


class StopStrings:
    """The bytes of a request that may still turn out to begin a stop string."""

    def __init__(self, stop: tuple[bytes, ...]) -> None:
        """Begin without bytes."""
        self._stop, self._held = stop, empty_piece()

    def pass_on(self, piece: Piece) -> Piece:
        """Return the bytes that no stop string can begin in, which end before the first one that is whole."""
        if not self._stop:
            return piece
        whole = join_pieces([self._held, piece])
        found = [place for stop in self._stop if (place := whole.data.find(stop)) >= 0]
        if found:
            return cut_piece(whole, 0, min(found), "stop")
        if piece.finish is not None:
            return whole
        count = max((_begun(whole.data, stop) for stop in self._stop), default=0)
        self._held = cut_piece(whole, len(whole.data) - count, len(whole.data))
        return cut_piece(whole, 0, len(whole.data) - count)

    def flush(self, finish: Finish) -> Piece:
        """Return what is held, as the last piece."""
        return replace(self._held, finish=finish)


def _begun(data: bytes, stop: bytes) -> int:
    """Count the bytes at the end of `data` that begin `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(data)), 0, -1) if data.endswith(stop[:n])), 0)


def cut_piece(piece: Piece, start: int, stop: int, finish: Finish | None = None) -> Piece:
    """Return the bytes start..stop of a piece."""
    arrays = {name: getattr(piece, name)[start:stop] for name in ARRAYS}
    return Piece(piece.data[start:stop], **arrays, finish=finish)


def empty_piece(finish: Finish | None = None) -> Piece:
    """Return a piece without bytes."""
    numbers, tops = np.zeros(0, np.float32), np.zeros((0, TOP), np.float32)
    return Piece(b"", numbers, numbers, np.zeros(0, bool), tops.astype(np.int32), tops, finish)
