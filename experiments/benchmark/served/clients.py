"""Clients of a server, good and bad: each asks once, and tells what became of it."""

import asyncio
import json
import random
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["good", "vanishes", "slow", "malformed"]
Outcome = Literal["finished", "vanished", "refused", "malformed", "failed"]

SLOW_S = 0.02
"""Seconds that a slow reader waits before each line."""

MALFORMED = (
    b"{",
    b'{"prompt": 7}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": 1000000000}',
    b'{"prompt": "a", "wrong": 1}',
)
"""Bodies that a server must refuse with status 400."""


@dataclass
class Told:
    """The end of one request.

    Attributes:
      kind: of the client.
      outcome: what became of it.
      status: of the response; 0 without one.
      seconds: from the request to its end.
      status_s, first_s: seconds to the status line, and to the first bytes of text.
      gaps: seconds between pieces of text.
      drawn: bytes of text, as the server counts them.
      error: what went wrong with one that failed.
    """

    kind: Kind
    outcome: Outcome = "failed"
    status: int = 0
    seconds: float = 0.0
    status_s: float = 0.0
    first_s: float | None = None
    gaps: list[float] = field(default_factory=list)
    drawn: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Mix:
    """The share of each kind of bad client, and what good ones ask.

    Attributes:
      vanish, slow, malformed: shares.
      prompt_bytes, new_bytes: of a request at the most; at least a quarter of each.
    """

    vanish: float = 0.05
    slow: float = 0.05
    malformed: float = 0.02
    prompt_bytes: int = 256
    new_bytes: int = 64

    def draw_kinds(self, count: int, choose: random.Random) -> list[Kind]:
        """Return the kinds of `count` clients in any order, in exact shares."""
        shares: dict[Kind, float] = {"vanishes": self.vanish, "slow": self.slow, "malformed": self.malformed}
        kinds: list[Kind] = [kind for kind, share in shares.items() for _ in range(round(share * count))]
        kinds.extend("good" for _ in range(count - len(kinds)))
        choose.shuffle(kinds)
        return kinds

    def draw_body(self, kind: Kind, text: str, choose: random.Random) -> bytes:
        """Return the body of a request."""
        if kind == "malformed":
            return choose.choice(MALFORMED)
        length = choose.randint(self.prompt_bytes // 4, self.prompt_bytes)
        start = choose.randrange(len(text) - length)
        body: dict[str, Any] = {"prompt": text[start : start + length], "stream": True}
        body |= {"max_tokens": choose.randint(self.new_bytes // 4, self.new_bytes), "temperature": 0.8}
        body |= {"seed": choose.randrange(2**31), "stream_options": {"include_usage": True}}
        # Give slow readers much to read
        return json.dumps(body | ({"logprobs": 5, "patches": True} if kind == "slow" else {})).encode()


async def ask(port: int, kind: Kind, body: bytes, within_s: float) -> Told:
    """Send one request, and read its answer as a client of this kind does."""
    told, begun = Told(kind), time.monotonic()
    try:
        async with asyncio.timeout(within_s):
            await _talk(port, told, body, begun)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        told.error = f"{type(error).__name__}: {error}"
    told.seconds = time.monotonic() - begun
    return told


async def _talk(port: int, told: Told, body: bytes, begun: float) -> None:
    plain = socket.socket()
    if told.kind == "slow":
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=4096 if told.kind == "slow" else 2**16)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        told.status = int((await reader.readline()).split()[1])
        told.status_s = time.monotonic() - begun
        if told.status == 200:
            await _read_events(reader, told, begun)
        else:
            await reader.read()
            refusals: dict[int, Outcome] = {400: "malformed", 429: "refused"}
            told.outcome = refusals.get(told.status, "failed")
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, told: Told, begun: float) -> None:
    """Read pieces until the last; a client that vanishes leaves behind the first."""
    last, line = begun, b""
    while part := await reader.read(2048):
        *lines, line = (line + part).split(b"\n")
        for event in lines:
            if event.startswith(b"data: [DONE]"):
                told.outcome = "finished"
            elif event.startswith(b"data: "):
                now = time.monotonic()
                _take_event(json.loads(event[6:]), told, now - begun, now - last)
                last = now
        if told.kind == "vanishes" and told.first_s is not None:
            told.outcome = "vanished"
            return
        if told.kind == "slow":
            await asyncio.sleep(SLOW_S)


def _take_event(event: dict[str, Any], told: Told, since_begin: float, since_last: float) -> None:
    if "usage" in event:
        told.drawn = event["usage"]["completion_tokens"]
    elif event.get("choices", [{}])[0].get("text"):
        if told.first_s is None:
            told.first_s = since_begin
        else:
            told.gaps.append(since_last)
