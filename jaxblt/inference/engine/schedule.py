"""Which request is read, which decodes and which ends in each round: plain Python, which no device is needed for.

A request waits in the queue of its lane, takes the lane's first free slot, has its prompt read in pieces, and decodes.
It ends in exactly one of the states of `ENDS`, and gives its slot back at once. If a round surely draws its last byte,
the next round has the slot for another, before the results are known. Meanwhile the request is leaving. If the rounds
whose results are not known may have drawn the last bytes of a lane's requests, the lane waits for the results.
"""

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxblt.inference.engine.config import EngineConfig, Lane

State = Literal["waiting", "reading", "decoding", "leaving", "finished", "cancelled", "expired", "failed"]
ENDS = ("finished", "cancelled", "expired", "failed")
"""States in which a request ends. One that is refused gets no ticket."""


class Refused(RuntimeError):
    """A request that finds no place to wait.

    Attributes:
      retry_after: whole seconds until there may be one.
    """

    def __init__(self, said: str, retry_after: int) -> None:
        super().__init__(said)
        self.retry_after = retry_after


@dataclass(eq=False)
class Ticket:
    """A request as the scheduler sees it.

    Attributes:
      length: bytes of the prompt, its BOS included.
      limit: the most bytes to draw.
      lane: the number of its lane.
      deadline: the time of the clock at which it ends; infinite without.
      begun: the time at which it was submitted.
      to_read: bytes of the prompt to read before it decodes.
      state: where it is.
      slot: its row of the lane, while it has one.
      read: bytes of the prompt that were read.
      drawn: bytes that its rounds are known to have drawn.
      sent: rounds that draw for it and whose results are not known.
    """

    length: int
    limit: int
    lane: int
    deadline: float
    begun: float
    to_read: int
    state: State = "waiting"
    slot: int | None = None
    read: int = 0
    drawn: int = 0
    sent: int = 0


@dataclass(frozen=True)
class Part:
    """A piece of a prompt to read: the bytes start..stop of its ids, in a row of `size`; none at all if size is 0.

    The request has the slot in this round, whatever becomes of it meanwhile.
    """

    ticket: Ticket
    slot: int
    start: int
    stop: int
    size: int

    @property
    def is_last(self) -> bool:
        """True if the prompt is read with it."""
        return self.stop == self.ticket.to_read


@dataclass(frozen=True)
class Round:
    """The work of a round, in this order.

    Attributes:
      expired: requests that ended at their deadline.
      parts: of prompts to read.
      decoding: for each lane with rows that decode, their requests by slot.
    """

    expired: tuple[Ticket, ...]
    parts: tuple[Part, ...]
    decoding: dict[int, dict[int, Ticket]]


@dataclass
class _Rows:
    """The rows of a lane: who waits for one, which are free, who has one, and whose last bytes are on their way."""

    lane: Lane
    waiting: deque[Ticket] = field(default_factory=deque)
    free: list[int] = field(default_factory=list)
    taken: dict[int, Ticket] = field(default_factory=dict)
    leaving: set[Ticket] = field(default_factory=set)

    def release(self, ticket: Ticket) -> None:
        """Give the slot of a request back."""
        assert ticket.slot is not None
        del self.taken[ticket.slot]
        heapq.heappush(self.free, ticket.slot)
        ticket.slot = None


class Scheduler:
    """The places of all requests of an engine.

    Attributes:
      ended: how many requests ended in each state, "refused" included.
    """

    def __init__(
        self,
        config: EngineConfig,
        sizes: Sequence[int],
        *,
        draws: tuple[int, int] = (0, 1),
        known: Callable[[Ticket], int] = lambda ticket: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without requests.

        Args:
          config: lanes and the most requests that wait.
          sizes: lengths of the rows that pieces of prompts are read in, ascending. The last is the piece itself, and
            the prompt bytes of a round while rows decode.
          draws: the least and the most bytes that a round draws for a row that goes on.
          known: how many bytes of a prompt need no reading, asked when its request gets its slot.
          clock: seconds.
        """
        self._config, self._sizes, self._known, self._clock = config, tuple(sizes), known, clock
        self._least, self._most = draws
        self._rows = [_Rows(lane, free=list(range(lane.slots))) for lane in config.lanes]
        self._turn = 0
        self._service = 1.0
        self.ended: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return sum(len(rows.waiting) for rows in self._rows)

    @property
    def overdue(self) -> int:
        """Requests that wait although no slot is free for them."""
        return sum(max(0, len(rows.waiting) - len(rows.free)) for rows in self._rows)

    @property
    def running(self) -> int:
        """Requests that have or had a slot and have not ended."""
        return sum(len(rows.taken) + len(rows.leaving) for rows in self._rows)

    def submit(
        self, length: int, limit: int, deadline_s: float | None = None, *, to_read: int | None = None
    ) -> Ticket:
        """Queue a request.

        Args:
          length: bytes of the prompt, its BOS included.
          limit: the most bytes to draw.
          deadline_s: seconds after which it ends; None for no limit.
          to_read: bytes of the prompt to read before it decodes; None for all.

        Raises:
          ValueError: no lane holds it.
          Refused: as many wait as may.
        """
        lane = self._find_lane(length, limit)
        rows, waiting = self._rows[lane], self.overdue
        if waiting >= self._config.max_waiting and len(rows.waiting) >= len(rows.free):
            self.ended["refused"] += 1
            seconds = max(1, math.ceil(self._service * (len(rows.waiting) + 1) / rows.lane.slots))
            raise Refused(
                f"{waiting} requests wait, the most that may (max_waiting={self._config.max_waiting}): "
                f"try again in {seconds} s",
                seconds,
            )
        now = self._clock()
        deadline = math.inf if deadline_s is None else now + deadline_s
        ticket = Ticket(length, limit, lane, deadline, now, length if to_read is None else to_read)
        self._rows[lane].waiting.append(ticket)
        return ticket

    def _find_lane(self, length: int, limit: int) -> int:
        lanes = self._config.lanes
        holding = [i for i, lane in enumerate(lanes) if length + limit <= lane.capacity]
        if holding:
            return min(holding, key=lambda i: lanes[i].capacity)
        self.ended["refused"] += 1
        raise ValueError(
            f"a prompt of {length - 1} bytes and {limit} new ones do not fit: the largest lane holds "
            f"{max(lane.capacity for lane in lanes) - 1} bytes; shorten the prompt, or ask for fewer"
        )

    def shrink(self, lane: int, slots: int) -> None:
        """Take rows away from a lane in which no request has a row yet."""
        rows = self._rows[lane]
        rows.lane, rows.free = replace(rows.lane, slots=slots), list(range(slots))

    def end(self, ticket: Ticket, state: State) -> bool:
        """End a request and free its slot; return False if it has ended before."""
        if ticket.state in ENDS:
            return False
        rows = self._rows[ticket.lane]
        if ticket.state == "waiting":
            rows.waiting.remove(ticket)
        else:
            if ticket.state == "leaving":
                rows.leaving.remove(ticket)
            else:
                rows.release(ticket)
            self._service += 0.1 * (self._clock() - ticket.begun - self._service)
        ticket.state = state
        self.ended[state] += 1
        return True

    def live(self) -> Iterator[Ticket]:
        """Yield all requests that have not ended."""
        for rows in self._rows:
            yield from rows.waiting
            yield from rows.taken.values()
            yield from rows.leaving

    def next_round(self) -> Round:
        """Return the work of the next round, as if it were done."""
        now = self._clock()
        expired = tuple(ticket for ticket in self.live() if ticket.deadline <= now)
        for ticket in expired:
            self.end(ticket, "expired")
        parts = tuple(self._parts())
        decoding = {}
        for i, rows in enumerate(self._rows):
            tickets = {slot: ticket for slot, ticket in rows.taken.items() if ticket.state == "decoding"}
            if any(ticket.drawn + self._most * ticket.sent < ticket.limit for ticket in tickets.values()):
                decoding[i] = tickets
                self._count_sent(rows, tickets.values())
        return Round(expired, parts, decoding)

    def _count_sent(self, rows: _Rows, tickets: Iterable[Ticket]) -> None:
        """Count a round; after its last one a request leaves."""
        for ticket in tickets:
            ticket.sent += 1
            if ticket.drawn + self._least * ticket.sent >= ticket.limit:
                rows.release(ticket)
                rows.leaving.add(ticket)
                ticket.state = "leaving"

    def count_drawn(self, ticket: Ticket, count: int) -> None:
        """Count the bytes that a round has drawn for a request, now that they are known."""
        ticket.drawn += count
        ticket.sent -= 1

    def _parts(self) -> Iterator[Part]:
        """Yield the pieces of prompts that one round reads. Each round begins with another lane.

        Pieces count against the bytes of a round. While no row decodes, only pieces of the largest size count.
        """
        left, count = self._sizes[-1], len(self._rows)
        is_idle = not any(ticket.state == "decoding" for rows in self._rows for ticket in rows.taken.values())
        self._turn = (self._turn + 1) % count
        for i in range(count):
            rows = self._rows[(self._turn + i) % count]
            while (ticket := self._next_to_read(rows)) is not None:
                stop = min(ticket.to_read, ticket.read + self._sizes[-1])
                size = 0 if stop == ticket.read else next(n for n in self._sizes if n >= stop - ticket.read)
                counted = 0 if is_idle and size < self._sizes[-1] else size
                if counted > left:
                    return
                left -= counted
                assert ticket.slot is not None
                yield Part(ticket, ticket.slot, ticket.read, stop, size)
                ticket.read = stop
                if stop == ticket.to_read:
                    ticket.state = "decoding"

    def _next_to_read(self, rows: _Rows) -> Ticket | None:
        """Return the request whose prompt is being read, or the first that waits, which takes a slot."""
        for ticket in rows.taken.values():
            if ticket.state == "reading":
                return ticket
        if not rows.waiting or not rows.free:
            return None
        ticket = rows.waiting.popleft()
        ticket.slot = heapq.heappop(rows.free)
        ticket.state, ticket.read = "reading", self._known(ticket)
        rows.taken[ticket.slot] = ticket
        return ticket
