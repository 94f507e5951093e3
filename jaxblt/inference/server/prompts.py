"""Prompts of /v1/completions: how many there may be, and log-probabilities of their bytes (`echo` with `logprobs`)."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxblt.data.vocab import EOS, OFFSET
from jaxblt.inference.engine import Piece
from jaxblt.inference.engine.config import TOP
from jaxblt.inference.server.errors import ApiError, told
from jaxblt.inference.server.fields import Fields
from jaxblt.inference.server.service import Service
from jaxblt.inference.server.text import tell_tokens


def read_prompts(fields: Fields, count: int, service: Service) -> tuple[list[bytes], bool]:
    """Return the prompts of a request, and whether they came as base64.

    Args:
      fields: of the request.
      count: choices of each prompt.
      service: whose limit of choices holds.

    Raises:
      ApiError: there is none, or there are too many.
    """
    most = service.limits.choices
    prompts, coded = fields.documents("prompt", most=most)
    if (choices := count * len(prompts)) > most:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n = {count} have {choices} choices, and a request at most {most}: send fewer "
            "prompts, or a smaller n",
            param="n",
        )
    return prompts, coded


async def rank_prompt(service: Service, prompt: bytes) -> Any:
    """Return `jaxblt.answers.Ranks` of a prompt, as from `run.rank_bytes`; None for an empty one.

    Raises:
      ApiError: the model has no likelihoods, or one is not finite.
    """

    def ask(records: list[bytes]) -> Sequence[Any]:
        return service.run.rank_bytes(records, top=TOP, as_trained=service.engine.as_trained)

    with told("prompt"):
        return (await service.answers.answer("rank", ask, [prompt]))[0] if prompt else None


async def hold_until(
    ready: Sequence["asyncio.Task[Any]"], pieces: AsyncGenerator[tuple[int, Piece], None]
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield pieces of choices, those of choice i once `ready[i]` is done, and close both when whoever reads leaves.

    Pieces are taken as they come: the engine cancels a request whose bytes wait for too long.

    Raises:
      ApiError: a task or the pieces ended with it.
    """
    held: dict[int, list[Piece]] = {}
    coming = asyncio.ensure_future(anext(pieces, None))
    open_still = True
    try:
        while open_still or held:
            if coming.done() and open_still:
                piece = coming.result()
                if open_still := piece is not None:
                    held.setdefault(piece[0], []).append(piece[1])
                    coming = asyncio.ensure_future(anext(pieces, None))
            else:
                waiting = {task for task in (*ready, coming) if not task.done()}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for i in [i for i in held if ready[i].done()]:
                ready[i].result()
                for piece in held.pop(i):
                    yield i, piece
    finally:
        for task in (*ready, coming):
            task.cancel()
        await asyncio.gather(*ready, coming, return_exceptions=True)
        await pieces.aclose()


def check_prompts(service: Service, prompts: Sequence[bytes]) -> None:
    """Check prompts of a completion that draws no bytes.

    Raises:
      ApiError: one is longer than a lane holds, or the server takes no requests.
    """
    if service.why_not_ready is not None:
        raise ApiError(503, service.why_not_ready)
    for prompt in prompts:
        if len(prompt) > service.capacity:
            raise ApiError(
                400,
                f"a prompt of {len(prompt)} bytes does not fit: the largest lane holds {service.capacity} bytes; "
                "shorten the prompt",
                param="prompt",
            )


def tell_prompt(ranks: Any, prompt: bytes, offsets: list[int], top: int) -> dict[str, list[Any]]:
    """Return the log-probabilities of a prompt's bytes; null for the first, as OpenAI has it."""
    tokens, size = [byte + OFFSET for byte in prompt], len(prompt)
    told = tell_tokens(tokens, ranks.nats[:size], ranks.top_ids[:size], ranks.top_nats[:size], offsets, top)
    for name in ("token_logprobs", "top_logprobs"):
        told[name][0] = None
    return told


def tell_end(ranks: Any, offset: int, top: int) -> dict[str, list[Any]]:
    """Return the log-probability of EOS right behind a prompt.

    Clients that score with one new token drop the last one: without EOS they would drop a byte of the prompt.
    """
    return tell_tokens([EOS], ranks.nats[-1:], ranks.top_ids[-1:], ranks.top_nats[-1:], [offset], top)
