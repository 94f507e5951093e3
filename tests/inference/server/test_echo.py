"""Prompts that are told with log-probabilities, as clients ask for that rate texts."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from jaxblt.inference.engine.stream import Stream, empty_piece
from jaxblt.inference.server import make_app
from tests.inference.server.conftest import LIMITS
from tests.inference.server.test_app import completed

PROMPTS = ["", "a", "abé", "c" * 80]
"""The last one is read in windows."""


@pytest.fixture
def fresh(service):
    """An application whose records wait in turn: its lock belongs to one event loop."""
    return make_app(replace(service, limits=LIMITS))


@pytest.mark.slow(days=28, group="costly")
def test_logprobs_with_echo_are_those_of_the_prompt_and_of_what_follows(fresh, run):
    asked = {"prompt": PROMPTS[1:], "logprobs": 2, "max_tokens": 6}
    scored = run.score(PROMPTS[1:], per_byte=True).per_byte
    alone = completed(fresh, **asked).json["choices"]
    for choice, after, prompt, nats in zip(
        completed(fresh, echo=True, **asked).json["choices"], alone, PROMPTS[1:], scored, strict=True
    ):
        found, size = choice["logprobs"], len(prompt.encode())
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        np.testing.assert_allclose(found["token_logprobs"][1:size], nats[1:size], atol=2e-6)
        tokens = [chr(x) if x < 128 else f"bytes:\\x{x:02x}" for x in prompt.encode()]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert found[name][size:] == after["logprobs"][name]
        assert found["tokens"][:size] == tokens
        assert found["text_offset"][size:] == [x + len(prompt) for x in after["logprobs"]["text_offset"]]
        assert found["text_offset"][:size] == [
            len(prompt.encode()[:i].decode(errors="ignore")) for i in range(size)
        ]
        assert choice["text"] == prompt + after["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_is_scored_without_a_new_byte(stream, fresh, run, app):
    """Clients that rate texts ask for an echo, the likeliest byte at each place, and no new byte."""
    asked = {"prompt": PROMPTS, "logprobs": 1, "max_tokens": 0, "echo": True, "temperature": 0, "n": 1}
    reply = completed(fresh, stream=stream, **asked)
    choices = [part["choices"][0] for part in reply.events] if stream else reply.json["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        (p, "length") for p in PROMPTS
    ]
    assert choices[0]["logprobs"]["tokens"] == choices[0]["logprobs"]["token_logprobs"] == []
    ranks = run.rank_bytes(PROMPTS[1:], top=1)
    for choice, prompt, expected in zip(choices[1:], PROMPTS[1:], ranks, strict=True):
        found, greedy = choice["logprobs"], expected.nats[:-1] == expected.top_nats[:-1, 0]
        assert len(found["tokens"]) == len(prompt.encode())
        best = [
            value == max(top.values())
            for value, top in zip(*(found[k][1:] for k in ("token_logprobs", "top_logprobs")), strict=True)
        ]
        assert best == greedy[1:].tolist()
    if not stream:
        assert reply.json["usage"]["completion_tokens"] == 0
    assert completed(app, prompt="ab", echo=True, max_tokens=0).json["choices"][0]["text"] == "ab"


def test_an_end_right_behind_an_echoed_prompt_is_a_token(run, service, monkeypatch):
    """Clients drop the last token of what they asked for with one new one: it is never the prompt's."""

    def submit(request):
        stream = Stream(request, lambda _: None)
        stream.put(empty_piece("stop"))
        return stream

    monkeypatch.setattr(service.engine, "submit", submit)
    app = make_app(replace(service, limits=LIMITS))
    asked = {"prompt": ["ab", "b"], "logprobs": 1, "max_tokens": 1, "echo": True}
    choices = completed(app, **asked).json["choices"]
    for choice, ranks in zip(choices, run.rank_bytes(["ab", "b"]), strict=True):
        found = choice["logprobs"]
        assert found["tokens"] == [*choice["text"], "<eos>"]
        assert found["token_logprobs"][-1] == round(ranks.nats[-1], 6)
        assert found["text_offset"][-1] == len(choice["text"])
    [stopped] = completed(app, **asked | {"prompt": "ab", "stop": "x"}).json["choices"]
    assert stopped["logprobs"]["tokens"] == ["a", "b"]


@pytest.fixture
def held(run, service, monkeypatch):
    """A function that holds back the log-probabilities of prompts until what it is given returns true."""

    def hold(until):
        original = type(run).rank_bytes

        def rank_bytes(*given, **options):
            stop = time.monotonic() + 20
            while not until() and time.monotonic() < stop:
                time.sleep(0.01)
            return original(*given, **options)

        monkeypatch.setattr(type(run), "rank_bytes", rank_bytes)

    return hold


@pytest.mark.parametrize("stream", [True, False])
def test_bytes_are_read_while_a_prompt_is_ranked(stream, service, held):
    """Those that nobody reads would end the request, as if its client were too slow."""
    finished = lambda: service.engine.stats.ended.get("finished", 0)  # noqa: E731
    before = finished()
    held(lambda: finished() > before or not service.engine.stats.running)
    app = make_app(replace(service, limits=replace(LIMITS, unread_bytes=256)))
    reply = completed(app, prompt="ab", logprobs=1, max_tokens=380, echo=True, stream=stream)
    choices = [part["choices"][0] for part in reply.events] if stream else reply.json["choices"]
    assert choices[-1]["finish_reason"] == "length"
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 382


def test_a_choice_does_not_wait_for_the_prompt_of_another(service, held):
    """An empty prompt has nothing to rank: its bytes come while that of the other choice is ranked."""
    come, parts = threading.Event(), []
    held(come.is_set)
    app = make_app(replace(service, limits=LIMITS))

    async def noticed(scope, receive, send):
        async def notice(message):
            parts.append((message.get("body", b""), come.is_set()))
            if b'"index": 0' in parts[-1][0]:
                come.set()
            await send(message)

        await app(scope, receive, notice)

    began = time.monotonic()
    reply = completed(noticed, prompt=["", "ab"], logprobs=1, max_tokens=5, echo=True, stream=True)
    assert {part["choices"][0]["index"] for part in reply.events} == {0, 1}
    assert come.is_set()
    assert next(ready for body, ready in parts if b'"index": 1' in body)
    assert time.monotonic() - began < 20
