"""Records of many requests that are answered together: batches of about one length, closed by number or by time."""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Gathered[T]:
    """Items that wait for others like them; plain Python, which no clock is needed for.

    A batch is closed by its last item, or once its first one has waited long enough. Items leave in the order in which
    they came.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        """Begin without items.

        Args:
          most: items of a batch.
          wait_s: seconds that an item waits at the most.
        """
        self._most, self._wait_s = most, wait_s
        self._waiting: dict[Hashable, tuple[float, list[T]]] = {}

    def add(self, key: Hashable, item: T, now: float) -> list[T]:
        """Add an item to those of its key; return them all if there are enough, else nothing."""
        _, items = self._waiting.setdefault(key, (now + self._wait_s, []))
        items.append(item)
        return self._waiting.pop(key)[1] if len(items) == self._most else []

    @property
    def next_due(self) -> float | None:
        """The time at which the next batch must close; None if nothing waits."""
        return min((due for due, _ in self._waiting.values()), default=None)

    def take_due(self, now: float) -> list[list[T]]:
        """Return the batches that have waited long enough."""
        keys = [key for key, (due, _) in self._waiting.items() if due <= now]
        return [self._waiting.pop(key)[1] for key in keys]


Ask = Callable[[list[bytes]], Sequence[Any]]
"""Answers of a run about records, one each."""

Waiting = tuple[Ask, bytes, "asyncio.Future[Any]"]


class Answers:
    """Answers about the records of requests that come at about one time, in one call of the run."""

    def __init__(self, most: int, wait_s: float) -> None:
        """Begin without records; as for `Gathered`."""
        self._gathered: Gathered[Waiting] = Gathered(most, wait_s)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def answer(self, name: Hashable, ask: Ask, records: Sequence[bytes]) -> list[Any]:
        """Return the answer about each record, in order.

        Args:
          name: of the question; records of equal names are asked together.
          ask: the question, which is called in a thread of its own, one call at a time.
          records: of one request.
        """
        loop, futures = asyncio.get_running_loop(), []
        for record in records:
            futures.append(loop.create_future())
            # Gather records of about one length: a row is as long as the longest
            key, now = (name, len(record).bit_length()), loop.time()
            if closed := self._gathered.add(key, (ask, record, futures[-1]), now):
                self._begin(closed)
        self._set_timer()
        return list(await asyncio.gather(*futures))

    def _set_timer(self) -> None:
        """Wake up when the next batch must close: one timer serves all batches."""
        if self._timer is not None:
            self._timer.cancel()
        due = self._gathered.next_due
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._close)

    def _close(self) -> None:
        for batch in self._gathered.take_due(asyncio.get_running_loop().time()):
            self._begin(batch)
        # Wake up for the next batch too: without it records of another length wait for ever
        self._set_timer()

    def _begin(self, batch: list[Waiting]) -> None:
        task = asyncio.create_task(self._work(batch))
        # Keep the task: the loop itself would drop it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, batch: list[Waiting]) -> None:
        """Answer a batch; if it fails, answer each record alone, so that none bears the error of another."""
        async with self._turn:
            batch = [one for one in batch if not one[2].done()]
            if not await self._try(batch) and len(batch) > 1:
                for one in batch:
                    await self._try([one])

    async def _try(self, batch: list[Waiting]) -> bool:
        if not batch:
            return True
        try:
            found = await asyncio.to_thread(batch[0][0], [record for _, record, _ in batch])
        except Exception as error:
            if len(batch) == 1 and not batch[0][2].done():
                batch[0][2].set_exception(error)
            return False
        for (_, _, future), value in zip(batch, found, strict=True):
            if not future.done():
                future.set_result(value)
        return True
