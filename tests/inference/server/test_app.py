"""The server's answers, and what it says to clients that are wrong, leave, or read slowly."""

import asyncio
import base64
import gzip
import inspect
import json
import math
import random
import re
import string
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from jax._src.core import EvalTrace

import jaxblt
import jaxblt.inference.engine
from jaxblt.inference import SamplingConfig, beam_search
from jaxblt.inference.engine import Engine, Request, Sampling
from jaxblt.inference.server import Limits, Service, make_app
from jaxblt.inference.server.completions import FIELDS
from tests.answers.runs import make_run
from tests.docs.documents import ROOT, blocks
from tests.inference.engine import test_row_codes as routed
from tests.inference.server.conftest import CONFIG, LIMITS, Reply, call, post

BYTES = bytes(range(256))


def completed(app, **fields):
    reply = post(app, "/v1/completions", {"prompt": "ab", "seed": 5, "max_tokens": 20, **fields})
    assert reply.status == 200, reply.json
    return reply


def test_a_completion_has_the_bytes_of_generate(app, run):
    asked = {"max_new_bytes": 20, "sampling": SamplingConfig(1.0), "seed": [5]}
    expected = run.generate([b"ab"], **asked)[0]
    found = completed(app, model="tiny", prompt_base64=base64.b64encode(b"ab").decode(), prompt=None).json
    [choice] = found["choices"]
    assert base64.b64decode(choice["base64"]) == expected
    assert choice["text"] == expected.decode(errors="replace")
    assert choice["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}
    assert (found["object"], found["model"]) == ("text_completion", "tiny")


def test_choices_prompts_and_echo(app):
    """A choice has a seed of its own; prompts are texts or bytes."""
    one = completed(app, n=2, prompt=["ab", [97, 98], "c"], echo=True).json["choices"]
    assert [choice["index"] for choice in one] == list(range(6))
    assert one[0]["text"] == one[2]["text"] != one[1]["text"] == one[3]["text"]
    assert one[0]["text"] == "ab" + completed(app).json["choices"][0]["text"]
    assert completed(app, seed=6).json["choices"][0]["text"] == one[1]["text"][2:]


def test_equal_prompts_without_a_seed_get_texts_of_their_own(app):
    choices = completed(app, prompt=["ab"] * 3, seed=None).json["choices"]
    assert len({choice["text"] for choice in choices}) == 3


def test_a_null_is_a_field_that_is_left_out(app):
    """Clients send OpenAI's fields that they do not set as null, or holding nothing."""
    assert completed(app, suffix=None, logit_bias=None).status == 200
    assert completed(app, suffix="", logit_bias={}).status == 200


@pytest.mark.parametrize("alphabet", [None, "é日x"])
def test_a_stream_is_the_completion_in_whole_characters(alphabet, app):
    """Bytes that are no UTF-8 are replaced as in the whole text."""
    asked = {"n": 2, "max_tokens": 90, "alphabet": alphabet, "logprobs": 2}
    whole = completed(app, **asked).json
    reply = completed(app, stream=True, stream_options={"include_usage": True}, **asked)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *parts, last = reply.events
    assert last["usage"] == whole["usage"]
    for i, choice in enumerate(whole["choices"]):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == i]
        assert len(mine) > 3
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert list(chain(*(part["logprobs"][name] for part in mine))) == values
        offsets = choice["logprobs"]["text_offset"]
        assert len(offsets) == len(choice["logprobs"]["tokens"])
        assert 0 <= min(offsets) <= max(offsets) < len(choice["text"])


def test_logprobs_name_the_best_bytes(app):
    logprobs = completed(app, temperature=0, logprobs=5).json["choices"][0]["logprobs"]
    for token, value, top in zip(
        *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert len(top) == 5
        if token in top:
            assert top[token] == value
        assert max(top.values()) >= value


def test_a_beam_search_is_that_of_the_function(app, run):
    """The best of a search, for each prompt, ordered by nats a byte unless told otherwise."""
    options = {"max_new_bytes": 5, "beams": 3, "alphabet": b"ab"}
    decoder, params = run.decoder, run.decoder_params
    expected = [
        beam_search(decoder, params, prompt, length_exponent=1.0, **options) for prompt in (b"a", b"bb")
    ]
    asked = {"use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 5, "alphabet": "ab"}
    asked |= {"stream": False, "top_p": 1.0, "stop": [], "adapter": "router"}
    found = post(app, "/v1/completions", {"prompt": ["a", "bb"], "echo": True, **asked}).json
    told = [(choice["text"], choice["log_likelihood"]) for choice in found["choices"]]
    pairs = [(p, beam) for p, beams in zip(("a", "bb"), expected, strict=True) for beam in beams[:2]]
    assert told == [(p + beam.data.decode(), beam.log_likelihood) for p, beam in pairs]
    assert [c["finish_reason"] for c in found["choices"]] == [
        "stop" if beam.ended else "length" for _, beam in pairs
    ]
    drawn = sum(len(beam.data) for _, beam in pairs)
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": drawn, "total_tokens": 3 + drawn}


def test_a_beam_search_has_a_time_limit(run, service):
    app = make_app(replace(service, limits=Limits(seconds=1e-6)))
    asked = {"prompt": "a", "use_beam_search": True, "n": 3, "max_tokens": 5}
    reply = post(app, "/v1/completions", asked)
    assert (reply.status, reply.json["error"]["type"]) == (504, "timeout_error")


@pytest.mark.parametrize("leaves", [True, False])
def test_a_beam_search_ends_with_its_client_and_with_the_server(leaves, service, monkeypatch):
    """In the middle of its work, which is in a thread that nobody can cancel."""
    ended = threading.Event()

    def search(prompt, *, check, **options):
        try:
            while True:
                check()
                time.sleep(0.001)
        finally:
            ended.set()

    monkeypatch.setattr(service.engine, "search", search)
    mine = replace(service, limits=Limits(gather_s=0))

    async def ask():
        body = json.dumps({"prompt": "a", "use_beam_search": True}).encode()
        reply = Reply(make_app(mine), "POST", "/v1/completions", body)
        asyncio.get_running_loop().call_later(0.1, end, reply)
        return await reply.run()

    def end(reply):
        if leaves:
            reply._left.set()
        else:
            mine.ends = time.monotonic()

    reply = asyncio.run(ask())
    assert ended.wait(60)
    assert reply.status == (0 if leaves else 503)


def test_stop_strings_and_penalties(app):
    asked = {"temperature": 0, "alphabet": string.ascii_lowercase, "max_tokens": 40}
    text = completed(app, **asked).json["choices"][0]["text"]
    stop = text[-2:]
    stopped = completed(app, stop=["never", stop], **asked).json["choices"][0]
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    spread = completed(app, presence_penalty=100, **asked).json["choices"][0]["text"]
    assert len(set(text)) < len(text)
    assert len(set(spread)) == len(spread) > 1


def test_scores_and_embeddings_are_those_of_the_run(app, run):
    records, names = [b"abc", b"de"], ["abc", [100, 101]]
    scores = run.score(records, per_byte=True)
    found = post(app, "/v1/scores", {"input": names, "per_byte": True}).json
    for i, entry in enumerate(found["data"]):
        assert entry["log_likelihood"] == scores.log_likelihood[i]
        assert entry["per_byte"] == scores.per_byte[i].tolist()
    states = run.embed(records, pool="last")
    found = post(app, "/v1/embeddings", {"input": names, "pool": "last"}).json
    np.testing.assert_allclose(found["data"][1]["embedding"], states.arrays[1], rtol=0)
    found = post(app, "/v1/embeddings", {"input": "abc", "encoding_format": "base64"}).json
    array = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(array, run.embed(records).arrays[0])


def test_records_are_read_in_the_case_that_the_server_was_told(app, service, monkeypatch):
    told = []
    for name in ("score", "embed"):
        original = getattr(type(service.run), name)

        def call(*given, original=original, **options):
            told.append(options["as_trained"])
            return original(*given, **options)

        monkeypatch.setattr(type(service.run), name, call)
    monkeypatch.setattr(type(service.engine), "as_trained", False)
    for path in ("/v1/scores", "/v1/embeddings"):
        assert post(app, path, {"input": "abc"}).status == 200
    assert told == [False, False]


WRONG = [
    (b"{", 400, None, "the body is not JSON"),
    (b"[" * 100_000, 413, None, "the body must have at most 20000 bytes, got 100000"),
    (b"\xff", 400, None, "the body is not JSON"),
    ([], 400, None, "the body must be a JSON object, got []"),
    ({"promt": "a"}, 400, "promt", "unknown field 'promt' (perhaps prompt); known are model, prompt"),
    ({"prompt": 5}, 400, "prompt", "prompt must be text or a list, got 5"),
    (
        {"prompt": ["a", 5]},
        400,
        "prompt",
        "prompt must hold texts, or lists of bytes as numbers 0..255, got 5",
    ),
    ({"prompt": [256]}, 400, "prompt", "lists of bytes as numbers 0..255, got 256"),
    ({"prompt": [1, 2, 999]}, 400, "prompt", "lists of bytes as numbers 0..255, got 999"),
    ({"prompt": []}, 400, "prompt", "prompt must hold 1..6 documents, got 0"),
    ({"prompt": ["a"] * 7}, 400, "prompt", "prompt must hold 1..6 documents, got 7"),
    ({"prompt": "\ud800"}, 400, "prompt", "no UTF-8 form: send its bytes as prompt_base64"),
    ({"prompt": "a", "stop": "\ud800"}, 400, "stop", "at character 0, which has no UTF-8 form: leave it out"),
    ({"prompt_base64": "?"}, 400, "prompt_base64", "prompt_base64 must hold base64, got '?'"),
    ({"prompt": "a", "prompt_base64": "YQ=="}, 400, "prompt_base64", "were both given"),
    (
        {"prompt": "a" * 390},
        400,
        "prompt",
        "a prompt of 390 bytes and 16 new ones do not fit: the largest lane holds 399",
    ),
    ({"model": "gpt-4"}, 404, "model", "model 'gpt-4' is not served: it is 'tiny'"),
    ({"max_tokens": -1}, 400, "max_tokens", "max_tokens must lie in 1..399, got -1"),
    ({"max_tokens": 10**12}, 400, "max_tokens", "max_tokens must lie in 1..399, got 1000000000000"),
    ({"max_tokens": 2.5}, 400, "max_tokens", "max_tokens must be a whole number, got 2.5"),
    ({"max_tokens": True}, 400, "max_tokens", "max_tokens must be a whole number, got True"),
    ({"temperature": math.nan}, 400, "temperature", "temperature must be a finite number, got nan"),
    ({"temperature": -1}, 400, "temperature", "temperature must lie in 0..1000000.0, got -1"),
    ({"temperature": "hot"}, 400, "temperature", "temperature must be a finite number, got 'hot'"),
    ({"top_p": 0}, 400, "top_p", "top_p must lie in 1e-06..1, got 0"),
    ({"n": 7}, 400, "n", "n must lie in 1..6, got 7"),
    (
        {"best_of": 2},
        400,
        "best_of",
        "best_of = 2 differs from n = 1, and every choice that is drawn is told",
    ),
    ({"prompt": ["a"] * 4, "n": 2}, 400, "n", "4 prompts with n = 2 have 8 choices, and a request at most 6"),
    (b" ", 400, None, "the body is empty: send a JSON object"),
    ({"logprobs": 6}, 400, "logprobs", "logprobs must lie in 0..5, got 6"),
    ({"max_tokens": 0}, 400, "max_tokens", "max_tokens must lie in 1..399, got 0"),
    (
        {"prompt": "a" * 400, "echo": True, "max_tokens": 0},
        400,
        "prompt",
        "a prompt of 400 bytes does not fit: the largest lane holds 399 bytes",
    ),
    ({"echo": 1}, 400, "echo", "echo must be true or false, got 1"),
    ({"stop": ["a", ""]}, 400, "stop", "stop must be text or a list of texts, none empty"),
    ({"stop": ["a"] * 17}, 400, "stop", "stop must have at most 16 texts, got 17"),
    ({"alphabet": ""}, 400, None, "Sampling.alphabet holds b''"),
    ({"seed": -1}, 400, "seed", "seed must lie in 0..4294967295, got -1"),
    ({"frequency_penalty": 101}, 400, "frequency_penalty", "must lie in -100.0..100.0, got 101"),
    ({"adapter": 0}, 400, "adapter", "adapter must be left out, the model offers none, got 0"),
    ({"use_beam_search": True, "stream": True}, 400, "stream", "a beam search reads no stream"),
    ({"use_beam_search": True, "temperature": 0.5}, 400, "temperature", "a beam search draws nothing"),
    ({"use_beam_search": True, "n": 3, "best_of": 2}, 400, "best_of", "best_of must lie in 3..6, got 2"),
    ({"use_beam_search": True, "alphabet": ""}, 400, "alphabet", "alphabet is empty"),
    ({"use_beam_search": True, "prompt": "a" * 390}, 400, "prompt", "a prompt of 390 bytes and 16 new ones"),
    (
        {"use_beam_search": True, "best_of": 5, "max_tokens": 300},
        400,
        "best_of",
        "5 beams of a prompt of 0 bytes and 300 new ones do not fit: the rows of a search hold 1200 bytes",
    ),
    ({"use_beam_search": True, "length_penalty": 11}, 400, "length_penalty", "must lie in 0..10, got 11"),
    ({"length_penalty": 1}, 400, "length_penalty", "length_penalty needs use_beam_search"),
    ({"stream_options": {"usage": 1}}, 400, "stream_options", "stream_options must be an object"),
]


def test_what_is_wrong_is_named_with_its_limit(app, service):
    for body, status, param, said in WRONG:
        reply = post(app, "/v1/completions", body)
        error = reply.json["error"]
        assert (reply.status, error["param"]) == (status, param), error
        assert said in error["message"]
        assert error["type"] == "not_found_error" if status == 404 else "invalid_request_error"
    too_long = post(app, "/v1/embeddings", {"input": ["a", ""]})
    assert (too_long.status, too_long.json["error"]["param"]) == (400, "input")
    assert "document 1 of input must have 1..399 bytes, got 0" in too_long.json["error"]["message"]
    wrong_method = call(app, "GET", "/v1/completions")
    assert (wrong_method.status, wrong_method.headers["Allow".lower()]) == (405, "POST")
    assert wrong_method.json["error"]["message"] == "Method Not Allowed: GET /v1/completions; use POST"
    assert service.engine.stats.running == service.engine.stats.waiting == 0


def test_a_path_that_does_not_exist_is_told_those_that_do(app):
    error = post(app, "/v1/chat/completions", {}).json["error"]
    assert (error["type"], error["param"]) == ("not_found_error", None)
    said, _, known = error["message"].partition("; the paths are ")
    assert said == "Not Found: POST /v1/chat/completions"
    assert known.startswith(
        "POST /v1/completions, POST /v1/scores, POST /v1/embeddings, GET /, GET /v1/models, GET /v1/models/NAME, "
    )


def test_a_compressed_body_is_refused_by_its_name(app):
    reply = Reply(app, "POST", "/v1/completions", gzip.compress(b"{}"))
    reply.scope["headers"].append((b"content-encoding", b"gzip"))
    asyncio.run(reply.run())
    said = "Content-Encoding 'gzip' is not read: send the body as it is"
    assert (reply.status, reply.json["error"]["message"]) == (415, said)
    reply = Reply(app, "POST", "/v1/completions", b"{}")
    reply.scope["headers"].append((b"content-encoding", b"Identity"))
    asyncio.run(reply.run())
    assert reply.status == 200


def test_what_is_wrong_is_refused_without_the_engine(app, service, monkeypatch):
    """While its thread holds the lock, and without an operation on the device."""
    held, ended, asked = threading.Event(), threading.Event(), []

    def hold():
        with service.engine._changed:
            held.set()
            ended.wait(60)

    wrong = [(body, status) for body, status, *_ in WRONG if "do not fit" not in _[1]]
    monkeypatch.setattr(EvalTrace, "process_primitive", lambda trace, primitive, *_: asked.append(primitive))
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    for body, status in wrong:
        assert post(app, "/v1/completions", body).status == status
    assert thread.is_alive()
    ended.set()
    thread.join()
    assert not asked


def test_models_health_and_metrics(app):
    [model] = call(app, "GET", "/v1/models").json["data"]
    assert model["id"] == "tiny"
    assert call(app, "GET", "/v1/models/tiny").json == model
    other = call(app, "GET", "/v1/models/other/0")
    assert (other.status, other.json["error"]["param"]) == (404, "model")
    assert [call(app, "GET", path).status for path in ("/health", "/ready")] == [200, 200]
    completed(app)
    text = call(app, "GET", "/metrics").parts[0].decode()
    for line in (
        'jaxblt_requests_ended_total{state="finished"}',
        "jaxblt_first_byte_seconds_count",
        "jaxblt_rounds_total",
    ):
        assert line in text
    assert 'jaxblt_responses_total{path="/v1/completions",status="200"}' in text
    assert 'path="/v1/models/{name:path}",status="404"' in text
    assert "other" not in text


@pytest.mark.slow(days=28, group="costly", turn="inference/server/test_app")
def test_a_client_chooses_an_adapter_that_the_model_offers():
    run = make_run(routed.MODEL)
    with Engine(run, routed.CONFIG) as engine:
        app = make_app(Service(run, engine, "bank"))
        offered = ["router", "base", "static", 0, 1]
        assert call(app, "GET", "/v1/models").json["data"][0]["adapters"] == offered
        for name, adapter in zip(offered, (None, "base", "static", 0, 1), strict=True):
            alone = engine.submit(Request(b"ab", 20, Sampling(seed=5), adapter=adapter)).read()
            [choice] = completed(app, adapter=name, prompt=None, prompt_base64="YWI=").json["choices"]
            assert base64.b64decode(choice["base64"]) == alone.data
        for wrong in (2, "poet", True, 1.0, [0]):
            reply = post(app, "/v1/completions", {"prompt": "a", "adapter": wrong})
            said = f"adapter must be one of router, base, static, 0, 1, got {wrong!r}"
            assert (reply.status, reply.json["error"]["param"]) == (400, "adapter")
            assert reply.json["error"]["message"] == said


def test_a_key_is_asked_for(service):
    app = make_app(Service(service.run, service.engine, "tiny", key="secret"))
    for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
        assert call(app, "GET", "/v1/models", key=key).status == status
    assert call(app, "GET", "/health").status == 200


def wait_for_slots(engine):
    """Rounds until no request has a slot."""
    before, stop = engine.stats.rounds, time.monotonic() + 60
    while engine.stats.running and time.monotonic() < stop:
        time.sleep(0.001)
    assert engine.stats.running == 0
    return engine.stats.rounds - before


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(stream, app, service):
    """At once, whether it waits for parts or for all."""
    ended = dict(service.engine.stats.ended)

    async def leave():
        body = {"prompt": "a", "n": 3, "max_tokens": 380, "stream": stream, "temperature": 0}
        reply = Reply(app, "POST", "/v1/completions", json.dumps(body).encode(), leaves_after=2)
        if not stream:
            reply._left.set()
        await reply.run()

    asyncio.run(leave())
    assert wait_for_slots(service.engine) <= 2
    more = Counter(service.engine.stats.ended) - Counter(ended)
    assert more.total() == 3
    assert stream or more["cancelled"] == 3
    counted = call(app, "GET", "/metrics").parts[0].decode()
    assert stream or {"None", "499"} & set(re.findall(r'status="(\w+)"', counted)) == {"499"}


def test_a_client_that_leaves_within_its_body_is_no_error(app):
    reply = Reply(app, "POST", "/v1/completions", b"{")

    async def receive():
        return {"type": "http.disconnect"}

    reply.receive = receive
    asyncio.run(reply.run())
    assert (reply.status, reply.parts) == (0, [])


@pytest.mark.slow(days=28, group="costly", turn="inference/server/test_app")
def test_a_storm_of_clients_is_accounted_for(run):
    """Some leave, some are wrong, some are refused; the others get what they would get alone."""
    draw = random.Random(0)
    good = [{"prompt": "p" * draw.randrange(200), "seed": i % 3, "max_tokens": 24} for i in range(80)]
    with Engine(run, CONFIG) as engine:
        app = make_app(Service(run, engine, "tiny", limits=LIMITS))
        kinds = [draw.choices(("good", "gone", "wrong"), (16, 3, 1))[0] for _ in good]

        async def ask(kind, body):
            await asyncio.sleep(draw.random() / 10)
            data = b"{" if kind == "wrong" else json.dumps({**body, "stream": kind == "gone"}).encode()
            leaves = 1 if kind == "gone" else None
            return await Reply(app, "POST", "/v1/completions", data, leaves_after=leaves).run()

        async def storm():
            return await asyncio.gather(*map(ask, kinds, good))

        replies = asyncio.run(storm())
        wait_for_slots(engine)
        ended = engine.stats.ended
        alone = {}
        for kind, body, reply in zip(kinds, good, replies, strict=True):
            assert reply.status == 400 if kind == "wrong" else reply.status in (200, 429)
            if kind == "good" and reply.status == 200:
                key = json.dumps(body)
                alone[key] = alone.get(key) or post(app, "/v1/completions", body).json["choices"]
                assert reply.json["choices"] == alone[key]
    statuses = Counter(reply.status for reply in replies)
    assert ended.get("refused", 0) == statuses[429]
    assert ended["finished"] + ended.get("cancelled", 0) == statuses[200]
    assert len(alone) > 5


def test_a_reader_who_takes_nothing_is_cancelled(run):
    """Its buffer is bounded, and so is the time of a part."""
    limits = {"unread_bytes": 64, "stalled_s": 0.5}
    with Engine(run, CONFIG) as engine:
        app = make_app(Service(run, engine, "tiny", limits=Limits(**limits)))

        async def stall():
            body = {"prompt": "a", "max_tokens": 380, "stream": True, "temperature": 0}
            reply = Reply(app, "POST", "/v1/completions", json.dumps(body).encode())

            async def send(message):
                if message["type"] == "http.response.body":
                    await asyncio.sleep(60)

            reply.send = send
            with pytest.raises(TimeoutError):
                await reply.run()

        asyncio.run(stall())
        wait_for_slots(engine)
        assert engine.stats.ended == {"cancelled": 1}
        assert engine.stats.drawn_bytes < 380


def test_a_full_server_says_when_to_come_back(run):
    """All choices of a request are taken, or none."""
    engine = Engine(run, CONFIG)
    waiting = [engine.submit(Request(b"a", 8)) for _ in range(8)]
    app = make_app(Service(run, engine, "tiny", limits=LIMITS))
    reply = post(app, "/v1/completions", {"prompt": "a", "n": 2})
    assert reply.status == 429
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json["error"]["type"] == "rate_limit_error"
    assert engine.stats.waiting == 8
    with engine:
        assert all(stream.read().finish == "length" for stream in waiting)


def test_a_request_has_a_time_limit_and_a_failure_is_told(run, monkeypatch):
    with Engine(run, CONFIG) as engine:
        late = make_app(Service(run, engine, "tiny", limits=Limits(seconds=1e-6)))
        reply = post(late, "/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.json["error"]["type"]) == (504, "timeout_error")
        app = make_app(Service(run, engine, "tiny"))
        monkeypatch.setattr(engine._lanes[0], "decode", lambda slots: 1 / 0)
        assert post(app, "/v1/completions", {"prompt": "a"}).status == 500
        assert post(app, "/v1/completions", {"prompt": "a"}).status == 503
        assert [call(app, "GET", path).status for path in ("/health", "/ready")] == [503, 503]


def test_an_error_of_the_servers_own_is_told_and_logged(service, run):
    """In the shape of all errors, without what it says: that is for the log."""
    broken = SimpleNamespace(score=lambda *args, **options: len(5), embed=None)
    app = make_app(replace(service, run=broken))
    reply = Reply(app, "POST", "/v1/scores", b'{"input": "a"}')
    with pytest.raises(TypeError):
        asyncio.run(reply.run())
    assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
    assert "len" not in reply.json["error"]["message"]


def ray_serve(deployed):
    """What the guide's example asks of Ray Serve, in one process."""

    def deployment(**options):
        def decorate(cls):
            cls.bind = classmethod(lambda cls, *given: cls(*given))
            return cls

        return decorate

    return SimpleNamespace(deployment=deployment, run=deployed.append)


async def ask_deployed(replica):
    async def json():
        return {"prompt": "ab", "max_tokens": 5, "temperature": 0}

    replica.check_health()
    response = await replica(SimpleNamespace(json=json))
    data = b"".join([part async for part in response.body_iterator])
    replica.engine.close()
    return data


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_serving_md_runs(run, monkeypatch, capsys):
    """With the tiny run, its own lane, and a client that asks nobody."""
    import openai  # takes 1.5 s of CPU, which other processes need not spend

    create = inspect.signature(openai.resources.Completions.create)
    part = SimpleNamespace(choices=[SimpleNamespace(text=" upon")])

    def asked(**options):
        create.bind(None, **options)
        return [part]

    client = SimpleNamespace(completions=SimpleNamespace(create=asked))
    monkeypatch.setattr(openai, "OpenAI", lambda base_url, api_key: client)
    monkeypatch.setattr(jaxblt, "load", lambda path: run)
    monkeypatch.setattr(jaxblt.inference.engine, "Engine", lambda run, config: Engine(run, CONFIG))
    names, deployed = {}, []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=ray_serve(deployed)))
    for text in blocks(ROOT / "docs" / "guides" / "serving.md", "python"):
        exec(compile(text, "serving.md", "exec"), names)
    assert len(asyncio.run(ask_deployed(*deployed))) == 5
    assert [type(text) for text in names["texts"]] == [bytes, bytes]
    said = capsys.readouterr().out
    assert "stop" in said or "length" in said
    assert said.endswith(" upon")


def test_the_page_asks_only_what_is_answered(app):
    """Its script calls paths that there are, with fields that are known."""
    page = call(app, "GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    text = b"".join(page.parts).decode()
    paths = {route.path: route.methods for route in app.routes}
    called = re.findall(r'fetch\("([^"]+)",\s*\{(?:method: "(\w+)")?', text)
    assert called == [("/v1/models", ""), ("/v1/completions", "POST")]
    assert all((method or "GET") in paths[path] for path, method in called)
    assert not re.findall(r"https?://|<link|src=", text)
    body = re.search(r"const body = \{(.*?)\};", text, re.DOTALL)
    assert set(re.findall(r"(\w+): ", body[1])) <= set(FIELDS)


def test_patches_are_told_byte_by_byte(app):
    [choice] = completed(app, patches=True, alphabet="\u00e9").json["choices"]
    assert len(choice["entropies"]) == len(choice["closed"]) == 20
    assert all(0 <= entropy <= math.log(260) for entropy in choice["entropies"])
    # A byte model has no patches that end
    assert set(choice["closed"]) <= {True, False}
    assert call(app, "GET", "/v1/models").json["data"][0]["threshold"] is None
