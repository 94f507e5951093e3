"""Errors in the shape that OpenAI's clients know."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxblt.inference.engine import Refused

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
"""The type of an error by its status; "invalid_request_error" for others below 500, "server_error" above."""


class ApiError(Exception):
    """An error that a client is told.

    Attributes:
      status: of HTTP.
      param: the field that it is about, or None.
      headers: of the response.
    """

    def __init__(
        self, status: int, said: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(said)
        self.status, self.param, self.headers = status, param, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


@contextmanager
def told(param: str | None = None) -> Iterator[None]:
    """Turn errors of the library into those that a client is told.

    Args:
      param: the field that the request's own errors are about.
    """
    try:
        yield
    except Refused as error:
        raise ApiError(429, str(error), headers={"Retry-After": str(error.retry_after)}) from error
    except ValueError as error:
        raise ApiError(400, str(error), param=param) from error
    except RuntimeError as error:
        raise ApiError(503, str(error)) from error
