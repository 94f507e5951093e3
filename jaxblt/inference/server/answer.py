"""Responses that end when their client leaves, or takes nothing for too long."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from jaxblt.inference.server.errors import ApiError

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""The function of ASGI that sends a message."""

JSON = "application/json"


class Answer:
    """A response, as an ASGI application: what it waits for is cancelled when the client leaves.

    Attributes:
      status: as it was sent; None before.
    """

    def __init__(self, write: Callable[["Answer", Send], Awaitable[None]]) -> None:
        """Take the function that writes it."""
        self._write, self.status = write, None

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Write it, while listening whether the client leaves."""
        work = asyncio.ensure_future(self._write(self, send))
        gone = asyncio.ensure_future(_wait_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            found, _ = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(found, Exception):
            raise found

    async def start(self, send: Send, status: int, kind: str, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.status = status
        fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        fields.append((b"content-type", kind.encode()))
        await send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(
        self,
        send: Send,
        body: bytes,
        *,
        status: int = 200,
        kind: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send all at once."""
        length = {"content-length": str(len(body))}
        await self.start(send, status, kind, {**length, **(headers or {})})
        await send({"type": "http.response.body", "body": body})


async def _wait_until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answer_json(work: Awaitable[dict[str, Any]]) -> Answer:
    """Return a response of what `work` returns, or of the error that it raises."""

    async def write(answer: Answer, send: Send) -> None:
        try:
            body = await work
        except ApiError as error:
            await write_error(answer, send, error)
        else:
            await answer.write(send, _coded(body))

    return Answer(write)


def answer_error(error: ApiError) -> Answer:
    """Return a response of an error."""

    async def write(answer: Answer, send: Send) -> None:
        await write_error(answer, send, error)

    return Answer(write)


def answer_text(body: bytes, kind: str) -> Answer:
    """Return a response of a text."""

    async def write(answer: Answer, send: Send) -> None:
        await answer.write(send, body, kind=kind)

    return Answer(write)


async def write_error(answer: Answer, send: Send, error: ApiError) -> None:
    """Send an error."""
    await answer.write(send, _coded(error.body), status=error.status, headers=error.headers)


def answer_events(parts: AsyncGenerator[dict[str, Any], None], stalled_s: float) -> Answer:
    """Return a response of parts that are sent as they come, as server-sent events.

    Args:
      parts: of the response; closed when the client leaves, or takes nothing for `stalled_s` seconds.
      stalled_s: seconds.
    """

    async def write(answer: Answer, send: Send) -> None:
        async def tell(text: bytes, *, more: bool = True) -> None:
            if answer.status is None:
                await answer.start(
                    send, 200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"}
                )
            message = {"type": "http.response.body", "body": b"data: " + text + b"\n\n", "more_body": more}
            await asyncio.wait_for(send(message), stalled_s)

        async with aclosing(parts):
            try:
                async for part in parts:
                    await tell(_coded(part))
                await tell(b"[DONE]", more=False)
            except ApiError as error:
                if answer.status is None:
                    return await write_error(answer, send, error)
                await tell(_coded(error.body), more=False)

    return Answer(write)


def _coded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
