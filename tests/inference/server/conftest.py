"""One tiny run, its engine, and the server's application over it, called without a socket."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxblt.inference.engine import Engine, EngineConfig, Lane
from jaxblt.inference.server import Limits, Service, make_app
from jaxblt.models import ByteLMConfig, StackConfig
from tests.answers.runs import HEADS, make_run
from tests.compiled import compiled_once_and_quickly
from tests.mixer_table import table

ONE = StackConfig(dim=16, num_layers=1, pattern="A", mlp_dim=24, mixers=table(attention=HEADS))
CONFIG = EngineConfig(lanes=(Lane(slots=3, capacity=400),), max_waiting=6, piece_bytes=64)
LIMITS = Limits(body_bytes=20_000, choices=6, records=4)


@pytest.fixture(autouse=True, scope="package")
def _compiled_once_and_quickly(compiled: str) -> Iterator[None]:
    with compiled_once_and_quickly(compiled):
        yield


@pytest.fixture(scope="package")
def run():
    return make_run(ByteLMConfig(stack=ONE))


@pytest.fixture(scope="module")
def service(run):
    with Engine(run, CONFIG) as engine:
        yield Service(run, engine, "tiny", limits=LIMITS)


@pytest.fixture(scope="module")
def app(service):
    return make_app(service)


class Reply:
    """What an application sends, and a client that leaves once a number of parts has come."""

    def __init__(
        self, app: Any, method: str, path: str, body: bytes, *, leaves_after: int | None = None
    ) -> None:
        self.status, self.headers, self.parts = 0, {}, []
        self._left, self._body, self._leaves_after = asyncio.Event(), body, leaves_after
        headers = {b"content-length": b"%d" % len(body)}
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers.items()),
            "query_string": b"",
            "root_path": "",
            "server": ("test", 80),
            "scheme": "http",
            "http_version": "1.1",
        }
        self._app, self._asked = app, False

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.parts.append(message["body"])
        if len(self.parts) == self._leaves_after:
            self._left.set()

    async def run(self) -> "Reply":
        await self._app(self.scope, self.receive, self.send)
        return self

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.parts))

    @property
    def events(self) -> list[Any]:
        """Parts of a stream; its last one says so."""
        lines = b"".join(self.parts).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def post(app: Any, path: str, body: Any = None, *, key: str | None = None, **options: Any) -> Reply:
    """Send JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return call(app, "POST", path, data, key=key, **options)


def call(
    app: Any, method: str, path: str, data: bytes = b"", *, key: str | None = None, **options: Any
) -> Reply:
    """Call an application once."""
    reply = Reply(app, method, path, data, **options)
    if key is not None:
        reply.scope["headers"].append((b"authorization", f"Bearer {key}".encode()))
    return asyncio.run(reply.run())
