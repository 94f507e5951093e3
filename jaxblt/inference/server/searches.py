"""Completions by beam search: the field use_beam_search of /v1/completions, as vLLM names it."""

import base64
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxblt.inference.beams import MOST_BEAMS, MOST_EXPONENT, Beam
from jaxblt.inference.sampling import LARGEST
from jaxblt.inference.server.errors import ApiError, told
from jaxblt.inference.server.fields import Fields, encode_text
from jaxblt.inference.server.prompts import read_prompts
from jaxblt.inference.server.service import ROUTED, Service

UNREAD: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1,
    "seed": None,
    "stop": [],
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logprobs": None,
    "stream": False,
    "stream_options": None,
    "patches": False,
    "adapter": ROUTED,
}
"""Fields that a beam search does not read, with the values that may be sent all the same."""


@dataclass(frozen=True)
class Search:
    """A beam search that a client asks for.

    Attributes:
      prompts: a search each.
      count: choices of each prompt.
      echo: the text begins with the prompt.
      coded: the bytes are told as base64 besides.
      options: of `beam_search`.
    """

    prompts: tuple[bytes, ...]
    count: int
    echo: bool
    coded: bool
    options: dict[str, Any]


def read_search(fields: Fields, service: Service) -> Search:
    """Read the fields of a request for a beam search.

    Raises:
      ApiError: a field is not what it should be, or has no meaning here.
    """
    if given := [name for name, default in UNREAD.items() if fields.differs(name, default)]:
        raise ApiError(
            400,
            f"{given[0]} and use_beam_search were both given: a beam search reads no {given[0]}",
            param=given[0],
        )
    if fields.number("temperature", 0.0, least=0, most=LARGEST):
        raise ApiError(
            400,
            "temperature and use_beam_search were both given, and a beam search draws nothing: leave one out, or "
            "set temperature to 0",
            param="temperature",
        )
    most = min(MOST_BEAMS, service.limits.choices)
    count = fields.whole("n", 1, least=1, most=most)
    beams = fields.whole("best_of", count, least=count, most=most)
    prompts, coded = read_prompts(fields, count, service)
    limit = fields.whole("max_tokens", min(16, service.capacity), least=1, most=service.capacity)
    for prompt in prompts:
        if len(prompt) + limit > service.capacity:
            raise ApiError(
                400,
                f"a prompt of {len(prompt)} bytes and {limit} new ones do not fit: the largest lane holds "
                f"{service.capacity} bytes; shorten the prompt, or ask for fewer",
                param="prompt",
            )
        if beams * (len(prompt) + limit) > service.search_bytes:
            raise ApiError(
                400,
                f"{beams} beams of a prompt of {len(prompt)} bytes and {limit} new ones do not fit: the rows of a "
                f"search hold {service.search_bytes} bytes together; ask for fewer beams or bytes",
                param="best_of",
            )
    alphabet = fields.text("alphabet")
    options = {
        "max_new_bytes": limit,
        "beams": beams,
        "alphabet": None if alphabet is None else encode_text("alphabet", alphabet),
        "length_exponent": fields.number("length_penalty", 1.0, least=0, most=MOST_EXPONENT),
    }
    if options["alphabet"] == b"":
        raise ApiError(400, "alphabet is empty: name characters, or leave it out", param="alphabet")
    return Search(tuple(prompts), count, fields.flag("echo"), coded, options)


async def search(asked: Search, service: Service) -> list[list[Beam]]:
    """Return the best continuations of each prompt."""
    if service.why_not_ready is not None:
        raise ApiError(503, service.why_not_ready)

    gone = threading.Event()
    check = make_check(service, gone)

    def ask(prompts: list[bytes]) -> list[list[Beam]]:
        found = []
        for prompt in prompts:
            # Begin no search, which may compile, once its time is over
            check()
            found.append(service.engine.search(prompt, **asked.options, check=check)[: asked.count])
        return found

    try:
        with told("prompt"):
            # Ask apart from other clients: their searches have ends of their own
            return await service.answers.answer(gone, ask, asked.prompts)
    finally:
        gone.set()


def make_check(service: Service, gone: threading.Event) -> Callable[[], None]:
    """Return a function that raises ApiError once a search must end.

    A search ends when its client is gone, when it takes too long, and when the server ends.
    """
    seconds = math.inf if service.limits.seconds is None else service.limits.seconds
    deadline = time.monotonic() + seconds

    def check() -> None:
        now = time.monotonic()
        if gone.is_set() or now > service.ends:
            raise ApiError(503, "the search was cancelled: the server is shutting down")
        if now > deadline:
            raise ApiError(504, f"the request took longer than {seconds} s: ask for fewer bytes or beams")

    return check


def tell(beam: Beam, index: int, prompt: bytes, asked: Search) -> dict[str, Any]:
    """Return the JSON of a choice."""
    data = prompt + beam.data if asked.echo else beam.data
    found = {"index": index, "text": data.decode(errors="replace"), "logprobs": None}
    found |= {"finish_reason": "stop" if beam.ended else "length", "log_likelihood": beam.log_likelihood}
    return found | ({"base64": base64.b64encode(data).decode()} if asked.coded else {})
