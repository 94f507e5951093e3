"""A run as the server sees it: its engine, its name, its limits, and whether it takes requests."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxblt.inference.engine import Engine, Piece, Stream
from jaxblt.inference.engine.engine import DecodableRun
from jaxblt.inference.server.errors import ApiError
from jaxblt.inference.server.gathering import Answers
from jaxblt.validation import check_bounds, check_fields

ROUTED = "router"
"""The adapter of clients that leave it to the router."""


@runtime_checkable
class ServedRun(DecodableRun, Protocol):
    """The members of `jaxblt.run.Run` that a server reads."""

    @property
    def score(self) -> Callable[..., Any]: ...

    @property
    def embed(self) -> Callable[..., Any]: ...

    @property
    def rank_bytes(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
      body_bytes: of a request's body.
      choices: continuations of a request, all prompts together.
      records: of a request for scores or embeddings.
      seconds: of a request; None for no limit.
      unread_bytes: that may wait for a slow reader.
      stalled_s: seconds that a reader may take nothing.
      gathered: records of all requests for scores or embeddings that are answered in one call.
      gather_s: seconds that a record waits for others at the most.
    """

    body_bytes: int = 8 << 20
    choices: int = 128
    records: int = 1024
    seconds: float | None = None
    unread_bytes: int = 65_536
    stalled_s: float = 30.0
    gathered: int = 32
    gather_s: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "body_bytes", "choices", "records", "unread_bytes", "gathered", least=1)
        check_bounds(self, "seconds", "stalled_s", above=0)
        check_bounds(self, "gather_s", least=0)


@dataclass(eq=False)
class Service:
    """A run and the engine that decodes it.

    Attributes:
      run: for scores and embeddings.
      engine: for completions, started and closed by whoever made it.
      name: of the model.
      key: that clients must send, or None.
      limits: what they may ask for.
      created: when it began, in seconds since 1970.
      draining: it takes no more requests.
      ends: the time of the monotonic clock at which what still runs is cancelled.
      answers: about records, beside the engine.
    """

    run: ServedRun
    engine: Engine
    name: str
    key: str | None = None
    limits: Limits = Limits()
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    ends: float = math.inf
    answers: Answers = field(init=False)

    def __post_init__(self) -> None:
        self.answers = Answers(self.limits.gathered, self.limits.gather_s)

    @property
    def why_not_ready(self) -> str | None:
        """The reason why no request would be answered, or None."""
        if self.engine.failure is not None:
            return f"the engine failed: {self.engine.failure}"
        return "the server is shutting down" if self.draining else None

    @property
    def capacity(self) -> int:
        """Bytes of the longest document that a lane holds, prompt and new bytes together."""
        return max(lane.capacity for lane in self.engine.config.lanes) - 1

    @property
    def search_bytes(self) -> int:
        """Bytes of all rows of a beam search together: it takes no more memory than the largest lane."""
        return max(lane.slots * lane.capacity for lane in self.engine.lanes)

    @property
    def adapters(self) -> tuple[str | int, ...]:
        """The adapters that clients may name, the default first; none for a model without a router."""
        found = self.engine.adapters
        return (ROUTED, *found) if found else ()

    @property
    def threshold(self) -> float | None:
        """Entropy in nats above which a patch ends; None for a model without."""
        return None if (patcher := self.run.decoder.patcher) is None else patcher.threshold

    def drain(self, within_s: float) -> None:
        """Take no more requests, and wait until all have ended; after `within_s` seconds cancel them."""
        self.draining, self.ends = True, time.monotonic() + within_s
        self.engine.close(within_s=within_s)


async def follow(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield the pieces of requests as they come, with their numbers; whoever leaves cancels them.

    Raises:
      ApiError: a request took too long, was cancelled, or failed.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(changed.set)

    for stream in streams:
        stream.call(notify)
    left = dict(enumerate(streams))
    try:
        while left:
            await changed.wait()
            changed.clear()
            for i, stream in tuple(left.items()):
                piece = _take(stream)
                if piece is None:
                    continue
                if piece.finish is not None:
                    del left[i]
                yield i, piece
    finally:
        for stream in streams:
            # Keep the engine's thread from calling a loop that is closed
            stream.call(lambda: None)
            stream.cancel()


def _take(stream: Stream) -> Piece | None:
    """Return what waits of a request, unless it was ended before its own end."""
    try:
        piece = stream.take()
    except (ValueError, RuntimeError) as error:
        raise ApiError(500, str(error)) from error
    if piece is not None and piece.finish == "expired":
        raise ApiError(
            504, f"the request took longer than {stream.request.deadline_s} s: ask for fewer bytes"
        )
    if piece is not None and piece.finish == "cancelled":
        raise ApiError(
            503, "the request was cancelled: the server is shutting down, or its reader is too slow"
        )
    return piece
