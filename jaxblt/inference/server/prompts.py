"""Log-probabilities of the bytes of prompts: `echo` with `logprobs` in /v1/completions."""

from collections.abc import Sequence
from typing import Any

from jaxblt.data.vocab import EOS, OFFSET
from jaxblt.inference.engine.config import TOP
from jaxblt.inference.server.errors import ApiError, told
from jaxblt.inference.server.service import Service
from jaxblt.inference.server.text import tell_tokens


async def rank_prompts(service: Service, prompts: Sequence[bytes]) -> list[Any]:
    """Return `jaxblt.answers.Ranks` of each prompt, as from `run.rank_bytes`; None for an empty one.

    Raises:
      ApiError: the model has no likelihoods, or one is not finite.
    """

    def ask(records: list[bytes]) -> Sequence[Any]:
        return service.run.rank_bytes(records, top=TOP, as_trained=service.engine.as_trained)

    with told("prompt"):
        found = iter(await service.answers.answer("rank", ask, [prompt for prompt in prompts if prompt]))
    return [next(found) if prompt else None for prompt in prompts]


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
