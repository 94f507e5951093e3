"""The bodies of /v1/completions: from JSON to requests of the engine, and from its pieces to JSON."""

import asyncio
import base64
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from jaxblt.inference.engine import Piece, Request, Sampling, Stream
from jaxblt.inference.engine.config import MOST_PENALTY, TOP, join_pieces
from jaxblt.inference.engine.stream import empty_piece
from jaxblt.inference.sampling import LARGEST, SMALLEST
from jaxblt.inference.server.errors import ApiError, told
from jaxblt.inference.server.fields import Fields, encode_text
from jaxblt.inference.server.prompts import (
    check_prompts,
    hold_until,
    rank_prompt,
    read_prompts,
    tell_end,
    tell_prompt,
)
from jaxblt.inference.server.searches import Search, read_search, search, tell
from jaxblt.inference.server.service import ROUTED, Service, follow
from jaxblt.inference.server.text import Text, logprobs_of
from jaxblt.validation import MOST, MOST_SEED

FIELDS = (
    *("model", "prompt", "prompt_base64", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop"),
    *("alphabet", "frequency_penalty", "presence_penalty", "n", "best_of", "echo", "logprobs", "stream"),
    *("stream_options", "user", "patches", "adapter", "use_beam_search", "length_penalty"),
)
"""Fields of a request; OpenAI has no "alphabet", "top_k", "prompt_base64", "patches", "adapter"; "user" is not read.
The last two are vLLM's."""
MOST_STOPS = 16
"""Stop strings of a request."""


@dataclass(frozen=True)
class Completion:
    """What a client asks of /v1/completions.

    Attributes:
      requests: for each choice, prompt after prompt.
      count: choices of each prompt.
      draws: bytes are drawn; otherwise the answer holds prompts only.
      echo: the text begins with the prompt, and log-probabilities with those of its bytes.
      top: how many of the most probable bytes are named with each byte; None for no log-probabilities.
      coded: the answer also has the bytes as base64.
      cut: the answer also has entropies and the ends of patches.
      stream: pieces are sent as they come.
      counted: a stream ends with a piece that counts bytes.
    """

    requests: tuple[Request, ...]
    count: int
    draws: bool
    echo: bool
    top: int | None
    coded: bool
    cut: bool
    stream: bool
    counted: bool

    @property
    def prompts(self) -> list[bytes]:
        """Each prompt once."""
        return [request.prompt for request in self.requests[:: self.count]]


def read_completion(data: bytes, service: Service) -> Completion | Search:
    """Read a request's body: choices to draw, or a beam search.

    Raises:
      ApiError: it is not what it should be.
    """
    fields = Fields(data, FIELDS)
    check_model(fields, service)
    if fields.flag("use_beam_search"):
        return read_search(fields, service)
    if "length_penalty" in fields:
        raise ApiError(400, "length_penalty needs use_beam_search: set it to true", param="length_penalty")
    count = fields.whole("n", 1, least=1, most=service.limits.choices)
    if (best := fields.whole("best_of", count, least=1, most=MOST)) != count:
        raise ApiError(
            400,
            f"best_of = {best} differs from n = {count}, and every choice that is drawn is told: leave best_of out, "
            "or set use_beam_search",
            param="best_of",
        )
    prompts, coded = read_prompts(fields, count, service)
    top = fields.whole("logprobs", 0, least=0, most=TOP) if "logprobs" in fields else None
    echo = fields.flag("echo")
    # Let nothing be drawn only behind an echo: scores of a prompt are asked for like this
    limit = fields.whole(
        "max_tokens", min(16, service.capacity), least=0 if echo else 1, most=service.capacity
    )
    adapter = fields.choice("adapter", service.adapters)
    if echo and top is not None and adapter not in (None, ROUTED):
        raise ApiError(
            400,
            f"adapter {adapter!r} was given, and logprobs of a prompt (echo) are those of {ROUTED!r}: leave one out",
            param="adapter",
        )
    limits: dict[str, Any] = {
        "deadline_s": service.limits.seconds,
        "max_unread": service.limits.unread_bytes,
        "adapter": None if adapter == ROUTED else adapter,
    }
    return Completion(
        tuple(
            Request(prompt, max(limit, 1), sampling, **limits)
            for prompt in prompts
            for sampling in _samplings(fields, count)
        ),
        count=count,
        draws=limit > 0,
        echo=echo,
        top=top,
        coded=coded,
        cut=fields.flag("patches"),
        stream=fields.flag("stream"),
        counted=fields.option("stream_options", "include_usage"),
    )


def check_model(fields: Fields, service: Service) -> None:
    """Raise ApiError for a model that is not the one that is served."""
    check_name(fields.text("model", service.name), service)


def check_name(name: str, service: Service) -> None:
    """Raise ApiError for a name that is not that of the model that is served."""
    if name != service.name:
        raise ApiError(404, f"model {name!r:.80} is not served: it is {service.name!r}", param="model")


def _samplings(fields: Fields, count: int) -> list[Sampling]:
    """Return how the choices of a prompt are drawn; each has a seed of its own.

    Without a seed in the request, each call draws another one: equal prompts of a list must not get equal texts.
    """
    temperature = fields.number("temperature", 1.0, least=0, most=LARGEST)
    seed = fields.whole("seed", secrets.randbelow(MOST_SEED), least=0, most=MOST_SEED)
    alphabet = fields.text("alphabet")
    penalty = {"least": -MOST_PENALTY, "most": MOST_PENALTY}
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": fields.whole("top_k", 0, least=0, most=MOST),
        "top_p": fields.number("top_p", 1.0, least=SMALLEST, most=1),
        "stop": fields.texts("stop", most=MOST_STOPS),
        "alphabet": None if alphabet is None else encode_text("alphabet", alphabet),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, **penalty),
        "presence_penalty": fields.number("presence_penalty", 0.0, **penalty),
    }
    with told():
        return [Sampling(**options, seed=(seed + i) % (MOST_SEED + 1)) for i in range(count)]


def submit(service: Service, asked: Completion) -> list[Stream]:
    """Queue the requests of a completion, all or none; there are none if nothing is drawn.

    Raises:
      ApiError: a lane is full, or none holds a request.
    """
    if not asked.draws:
        check_prompts(service, asked.prompts)
        return []
    if service.why_not_ready is not None:
        raise ApiError(503, service.why_not_ready)
    streams: list[Stream] = []
    try:
        for request in asked.requests:
            with told("prompt"):
                streams.append(service.engine.submit(request))
    except ApiError:
        for stream in streams:
            stream.cancel()
        raise
    return streams


@dataclass
class Choice:
    """One continuation, as it is told.

    Attributes:
      ranks: a task for those of its prompt (`jaxblt.answers.Ranks`), if it is told with log-probabilities.
    """

    index: int
    asked: Completion
    text: Text
    ranks: Any = None
    begun: bool = False
    drawn: int = 0

    def tell(self, piece: Piece) -> dict[str, Any]:
        """Return the JSON of the next piece."""
        asked, data = self.asked, piece.data
        self.drawn += len(data)
        echoed = asked.requests[self.index].prompt if asked.echo and not self.begun else b""
        data, self.begun = echoed + data, True
        offsets = self.text.offsets(data)
        text = self.text.add(data, last=piece.finish is not None)
        logprobs = None if asked.top is None else self._tell_logprobs(piece, echoed, offsets, asked.top)
        found = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish}
        if asked.coded:
            found["base64"] = base64.b64encode(data).decode()
        if asked.cut:
            found["entropies"] = [round(x, 4) for x in piece.entropies.tolist()]
            found["closed"] = piece.closed.tolist()
        return found

    def _tell_logprobs(
        self, piece: Piece, echoed: bytes, offsets: list[int], top: int
    ) -> dict[str, list[Any]]:
        """Return the log-probabilities of an echoed prompt, if this is its piece, and of the piece behind it."""
        parts = [logprobs_of(piece, offsets[len(echoed) :], top)]
        if echoed:
            parts.insert(0, tell_prompt(self.ranks.result(), echoed, offsets[: len(echoed)], top))
        stops = self.asked.requests[self.index].sampling.stop
        ranks = None if self.ranks is None else self.ranks.result()
        if ranks is not None and piece.finish == "stop" and not self.drawn and not stops:
            parts.append(tell_end(ranks, self.text.characters, top))
        return {name: [x for part in parts for x in part[name]] for name in parts[0]}


@asynccontextmanager
async def follow_choices(
    service: Service, asked: Completion, streams: list[Stream]
) -> AsyncGenerator[tuple[list[Choice], AsyncGenerator[tuple[int, Piece], None]], None]:
    """Give a choice for each request, and their pieces as they come; whoever leaves cancels the requests.

    Log-probabilities of prompts are computed meanwhile. Only the pieces behind them wait for them.
    """
    choices = [Choice(i, asked, Text()) for i in range(len(asked.requests))]
    pieces = follow(streams) if asked.draws else _draw_nothing(len(choices))
    if asked.echo and asked.top is not None:
        ranks = [asyncio.ensure_future(rank_prompt(service, prompt)) for prompt in asked.prompts]
        for choice in choices:
            choice.ranks = ranks[choice.index // asked.count]
        pieces = hold_until([choice.ranks for choice in choices], pieces)
    try:
        async with aclosing(pieces):
            yield choices, pieces
    finally:
        for stream in streams:
            stream.cancel()


async def _draw_nothing(count: int) -> AsyncGenerator[tuple[int, Piece], None]:
    for i in range(count):
        yield i, empty_piece("length")


async def complete(service: Service, asked: Completion, streams: list[Stream]) -> dict[str, Any]:
    """Wait for all choices and return the response."""
    parts: list[list[Piece]] = [[] for _ in asked.requests]
    async with follow_choices(service, asked, streams) as (choices, pieces):
        async for i, piece in pieces:
            parts[i].append(piece)
    found = [choice.tell(join_pieces(mine)) for choice, mine in zip(choices, parts, strict=True)]
    return _head(service) | {"choices": found, "usage": _usage(asked, choices)}


async def complete_search(service: Service, asked: Search) -> dict[str, Any]:
    """Search, and return the response."""
    found = await search(asked, service)
    pairs = [(prompt, beam) for prompt, beams in zip(asked.prompts, found, strict=True) for beam in beams]
    choices = [tell(beam, i, prompt, asked) for i, (prompt, beam) in enumerate(pairs)]
    usage = count_tokens(sum(map(len, asked.prompts)), sum(len(beam.data) for _, beam in pairs))
    return _head(service) | {"choices": choices, "usage": usage}


async def parts(
    service: Service, asked: Completion, streams: list[Stream]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the parts of a streamed response, of all choices as they come."""
    head = _head(service)
    async with follow_choices(service, asked, streams) as (choices, pieces):
        async for i, piece in pieces:
            yield head | {"choices": [choices[i].tell(piece)]}
    if asked.counted:
        yield head | {"choices": [], "usage": _usage(asked, choices)}


def _head(service: Service) -> dict[str, Any]:
    """Return what all parts of a response have in common."""
    name = f"cmpl-{uuid.uuid4().hex}"
    return {"id": name, "object": "text_completion", "created": int(time.time()), "model": service.name}


def _usage(asked: Completion, choices: list[Choice]) -> dict[str, int]:
    """Return the bytes of a response as its tokens; each prompt counts once."""
    drawn = sum(choice.drawn for choice in choices)
    return count_tokens(sum(map(len, asked.prompts)), drawn)


def count_tokens(read: int, drawn: int = 0) -> dict[str, int]:
    """Return bytes as the tokens of a response."""
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
