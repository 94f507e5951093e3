"""Completions by beam search: the field use_beam_search of /v1/completions, as vLLM names it."""

import base64
from dataclasses import dataclass
from typing import Any

from jaxblt.inference.beams import MOST_BEAMS, Beam
from jaxblt.inference.sampling import LARGEST
from jaxblt.inference.server.errors import ApiError, told
from jaxblt.inference.server.fields import Fields, encode_text
from jaxblt.inference.server.service import Service

UNREAD = (
    *("top_k", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty"),
    *("logprobs", "stream", "stream_options", "patches", "adapter"),
)
"""Fields that a beam search does not read."""


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
    if given := [name for name in UNREAD if name in fields]:
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
    prompts, coded = fields.documents("prompt", most=service.limits.choices // count)
    limit = fields.whole("max_tokens", min(16, service.capacity), least=1, most=service.capacity)
    for prompt in prompts:
        if len(prompt) + limit > service.capacity:
            raise ApiError(
                400,
                f"a prompt of {len(prompt)} bytes and {limit} new ones do not fit: the largest lane holds "
                f"{service.capacity} bytes; shorten the prompt, or ask for fewer",
                param="prompt",
            )
    alphabet = fields.text("alphabet")
    options = {
        "max_new_bytes": limit,
        "beams": beams,
        "alphabet": None if alphabet is None else encode_text("alphabet", alphabet),
        "length_exponent": fields.number("length_penalty", 1.0, least=0, most=100),
    }
    if options["alphabet"] == b"":
        raise ApiError(400, "alphabet is empty: name characters, or leave it out", param="alphabet")
    return Search(tuple(prompts), count, fields.flag("echo"), coded, options)


async def search(asked: Search, service: Service) -> list[list[Beam]]:
    """Return the best continuations of each prompt."""
    if service.why_not_ready is not None:
        raise ApiError(503, service.why_not_ready)

    def ask(prompts: list[bytes]) -> list[list[Beam]]:
        return [service.engine.search(prompt, **asked.options)[: asked.count] for prompt in prompts]

    with told("prompt"):
        return await service.answers.answer(
            ("search", *asked.options.values(), asked.count), ask, asked.prompts
        )


def tell(beam: Beam, index: int, prompt: bytes, asked: Search) -> dict[str, Any]:
    """Return the JSON of a choice."""
    data = prompt + beam.data if asked.echo else beam.data
    found = {"index": index, "text": data.decode(errors="replace"), "logprobs": None}
    found |= {"finish_reason": "stop" if beam.ended else "length", "log_likelihood": beam.log_likelihood}
    return found | ({"base64": base64.b64encode(data).decode()} if asked.coded else {})
