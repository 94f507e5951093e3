"""The routes of the server, as an ASGI application."""

import hmac
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from jaxblt.inference.engine import Stream
from jaxblt.inference.server.answer import Answer, answer_error, answer_events, answer_json, answer_text
from jaxblt.inference.server.completions import (
    check_name,
    complete,
    complete_search,
    parts,
    read_completion,
    submit,
)
from jaxblt.inference.server.errors import ApiError
from jaxblt.inference.server.metrics import Metrics
from jaxblt.inference.server.records import embed_records, score_records
from jaxblt.inference.server.searches import Search
from jaxblt.inference.server.service import Service

PAGE = resources.files("jaxblt.inference.server") / "page.html"
"""A page without a framework, which asks /v1/models and /v1/completions."""

Call = Callable[[Any], Awaitable[Answer]]
"""From a request of Starlette to a response."""

CLIENT_GONE = 499
"""The status that is counted, and never sent, if a client leaves before its answer begins; nginx counts the same."""


def make_app(service: Service) -> Any:
    """Return the ASGI application of a service, whose engine is started and closed by the caller."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    routes = _Routes(service)
    posts: dict[str, Call] = {
        "/v1/completions": routes.complete,
        "/v1/scores": routes.score,
        "/v1/embeddings": routes.embed,
    }
    gets: dict[str, Call] = {
        "/": routes.show_page,
        "/v1/models": routes.list_models,
        "/v1/models/{name:path}": routes.tell_model,
        "/health": routes.tell_health,
        "/ready": routes.tell_ready,
        "/metrics": routes.tell_metrics,
    }

    known = ", ".join(
        f"{method} {path}" for method, calls in (("POST", posts), ("GET", gets)) for path in calls
    ).replace("{name:path}", "NAME")

    async def refuse(request: Any, error: Any) -> Answer:
        headers = dict(error.headers or {})
        fix = f"use {headers['Allow']}" if "Allow" in headers else f"the paths are {known}"
        said = f"{error.detail}: {request.method} {request.url.path:.80}; {fix}"
        return answer_error(ApiError(error.status_code, said, headers=headers))

    async def tell_failure(request: Any, error: Any) -> Answer:
        return answer_error(ApiError(500, f"{type(error).__name__}; the server's log says more"))

    handlers: Any = {HTTPException: refuse, Exception: tell_failure}
    return Starlette(
        routes=[
            *(
                Route(path, _Endpoint(routes, call, path), methods=[method])
                for method, calls in (("POST", posts), ("GET", gets))
                for path, call in calls.items()
            )
        ],
        exception_handlers=handlers,
    )


class _Endpoint:
    """A route as an ASGI application: it checks the client's key, and counts what is answered."""

    def __init__(self, routes: "_Routes", call: Call, path: str) -> None:
        # Count by the route's path: clients choose the rest of an address, and each would be a series of its own
        self._routes, self._call, self._path = routes, call, path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        from starlette.requests import ClientDisconnect, Request

        request = Request(scope, receive)
        try:
            self._routes.check_key(request)
            answer = await self._call(request)
        except ApiError as error:
            answer = answer_error(error)
        except ClientDisconnect:
            # Nobody waits for an answer to half a body
            return
        unsent = CLIENT_GONE
        try:
            await answer(scope, receive, send)
        except Exception:
            unsent = 500
            raise
        finally:
            self._routes.metrics.responses.labels(self._path, str(answer.status or unsent)).inc()


class _Routes:
    """What each path answers."""

    def __init__(self, service: Service) -> None:
        self.service, self.metrics = service, Metrics(service.engine)

    def check_key(self, request: Any) -> None:
        """Raise ApiError for a client without the key, on paths that need it."""
        key = self.service.key
        if key is None or not request.url.path.startswith("/v1/"):
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(
                401,
                "the key is missing or wrong: send it as a bearer token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def read_body(self, request: Any) -> bytes:
        """Return the body of a request, unless it is too large or compressed."""
        if (coding := request.headers.get("content-encoding", "identity")).lower() not in ("", "identity"):
            raise ApiError(415, f"Content-Encoding {coding!r:.80} is not read: send the body as it is")
        most, data = self.service.limits.body_bytes, bytearray()
        length = request.headers.get("content-length", "0")
        told = int(length) if length.isdecimal() else 0
        if told <= most:
            async for part in request.stream():
                data += part
                if len(data) > most:
                    break
        if max(told, len(data)) > most:
            raise ApiError(
                413, f"the body must have at most {most} bytes, got {max(told, len(data))} or more"
            )
        return bytes(data)

    async def complete(self, request: Any) -> Answer:
        """Continue prompts, at once or as the bytes come."""
        service = self.service
        asked = read_completion(await self.read_body(request), service)
        if isinstance(asked, Search):
            return answer_json(complete_search(service, asked))
        streams = submit(service, asked)
        for stream in streams:
            stream.on_first = self._count_first
        if asked.stream:
            return answer_events(parts(service, asked, streams), service.limits.stalled_s)
        return answer_json(complete(service, asked, streams))

    def _count_first(self, stream: Stream) -> None:
        self.metrics.first_byte.observe(stream.age_s)

    async def score(self, request: Any) -> Answer:
        """Rate records."""
        return answer_json(score_records(await self.read_body(request), self.service))

    async def embed(self, request: Any) -> Answer:
        """Return hidden states of records."""
        return answer_json(embed_records(await self.read_body(request), self.service))

    async def list_models(self, request: Any) -> Answer:
        """Name the one model."""
        return answer_json(_now({"object": "list", "data": [self._model()]}))

    async def tell_model(self, request: Any) -> Answer:
        """Describe the one model, by its name."""
        check_name(request.path_params["name"], self.service)
        return answer_json(_now(self._model()))

    def _model(self) -> dict[str, Any]:
        service = self.service
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "jaxblt"}
        model |= {"max_bytes": service.capacity, "threshold": service.threshold}
        return model | {"adapters": list(service.adapters)}

    async def show_page(self, request: Any) -> Answer:
        """Return the page that shows bytes as they come."""
        return answer_text(PAGE.read_bytes(), "text/html; charset=utf-8")

    async def tell_health(self, request: Any) -> Answer:
        """Tell whether the engine works."""
        failure = self.service.engine.failure
        if failure is not None:
            raise ApiError(503, f"the engine failed: {failure}")
        return answer_json(_now({"status": "ok"}))

    async def tell_ready(self, request: Any) -> Answer:
        """Tell whether a request would be taken."""
        if self.service.why_not_ready is not None:
            raise ApiError(503, self.service.why_not_ready)
        return answer_json(_now({"status": "ready"}))

    async def tell_metrics(self, request: Any) -> Answer:
        """Write the numbers so far."""
        return answer_text(self.metrics.write(), "text/plain; version=0.0.4; charset=utf-8")


async def _now(body: dict[str, Any]) -> dict[str, Any]:
    return body
