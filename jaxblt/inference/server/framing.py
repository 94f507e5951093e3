"""Requests that are no HTTP, of which the application never hears."""

import json
from typing import Any

from jaxblt.inference.server.errors import ApiError


def json_protocol() -> type:
    """Return Uvicorn's protocol, which answers what is no HTTP in the shape of all other errors."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    protocol: Any = AutoHTTPProtocol

    class JsonProtocol(protocol):
        def send_400_response(self, msg: str) -> None:
            cycle = getattr(self, "cycle", None)
            if cycle is None or cycle.response_complete or not cycle.response_started:
                said = f"{msg.rstrip('.')}: send the request line, headers and body that HTTP/1.1 asks for"
                body = json.dumps(ApiError(400, said).body).encode()
                head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
                self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%s\r\n\r\n%s" % (head.encode(), body))
            self.transport.close()

    return JsonProtocol
