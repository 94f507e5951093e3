"""The server on a real socket, with OpenAI's own client, until SIGTERM."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

import jaxblt
from jaxblt.cli.main import main
from jaxblt.cli.serve import serve
from jaxblt.inference.engine import Engine
from jaxblt.inference.server import Service, run_server
from tests.inference.server.conftest import CONFIG, LIMITS


def status_of(address, path):
    try:
        with urllib.request.urlopen(address + path, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n"
BROKEN = (
    b"hello\r\n\r\n",
    POST + b"Content-Length: ten\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
)
"""Requests that are no HTTP: the first line, a header, a body."""


def exchange(address, sent):
    """Return all that the server answers to these bytes, until it closes the connection."""
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def use(address, run):
    """Ask as a client does, then end the server while it streams; return what was wrong."""
    import openai  # takes 1.5 s of CPU, which other processes need not spend

    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        asked = {"model": "tiny", "prompt": "ab", "max_tokens": 380, "temperature": 0}
        whole = client.completions.create(**asked).choices[0]
        assert whole.finish_reason == "length"
        assert [model.id for model in client.models.list()] == ["tiny"]
        state = client.embeddings.create(model="tiny", input="abc").data[0].embedding
        np.testing.assert_array_equal(np.float32(state), run.embed([b"abc"]).arrays[0])
        with pytest.raises(openai.BadRequestError, match="temperature must lie in 0"):
            client.completions.create(model="tiny", prompt="a", temperature=-1)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        for broken in BROKEN:
            head, body = exchange(address, broken).split(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json")
            error = json.loads(body)["error"]
            assert error["type"] == "invalid_request_error"
            assert "HTTP/1.1" in error["message"]
        parts = client.completions.create(stream=True, **asked)
        text = next(iter(parts)).choices[0].text
        os.kill(os.getpid(), signal.SIGTERM)
        # What runs is finished
        text += "".join(part.choices[0].text for part in parts)
        assert text == whole.text


def test_openais_client_works_unchanged_and_sigterm_drains(run):
    wrong, threads, before = [], [], signal.getsignal(signal.SIGTERM)

    def started(address):
        def work():
            try:
                use(address, run)
            except BaseException as error:
                wrong.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

        threads.append(threading.Thread(target=work))
        threads[0].start()

    engine = Engine(run, CONFIG)
    service = Service(run, engine, "tiny", key="secret", limits=LIMITS)
    with engine:
        run_server(service, host="127.0.0.1", port=0, drain_s=60, started=started)
    threads[0].join()
    if wrong:
        raise wrong[0]
    assert service.draining
    assert engine.stats.running == engine.stats.waiting == 0
    assert "cancelled" not in engine.stats.ended
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_command_serves_until_sigterm_and_says_whether_it_is_ready(run, monkeypatch, capsys):
    """While requests end, the socket still answers."""
    monkeypatch.setattr(jaxblt, "load", lambda *args, **options: run)
    drain, found, over = Service.drain, {}, threading.Event()

    def slowly(service, within_s):
        service.draining = True
        found["after"] = [status_of(address, path) for path in ("/ready", "/health")]
        drain(service, within_s)

    def work():
        while "before" not in found and not over.wait(0.1):
            with contextlib.suppress(urllib.error.URLError):
                found["before"] = status_of(address, "/ready")
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Service, "drain", slowly)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    threading.Thread(target=work, daemon=True).start()
    assert (
        main(["serve", "runs/tiny", "--port", str(port), "--lanes", "3x400", "--piece-bytes", "64"]) is None
    )
    assert found == {"before": 200, "after": [503, 200]}
    assert f"serving tiny at {address}" in capsys.readouterr().out


def test_a_call_that_outlasts_the_drain_is_waited_for(run, monkeypatch):
    """The server's thread would else go on while the interpreter ends, and die of it."""

    def score(*given, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        raise ValueError("late")

    def ask(address):
        # The server leaves without an answer
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/v1/scores", b'{"input": "a"}').close()

    def started(address):
        threading.Thread(target=ask, args=(address,)).start()

    monkeypatch.setattr(type(run), "score", score)
    with Engine(run, CONFIG) as engine:
        service = Service(run, engine, "tiny")
        run_server(service, host="127.0.0.1", port=0, drain_s=0.1, started=started)
    assert "server" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lanes", "8"), "--lanes '8' is not rows x bytes, such as 8x8192"),
        (("--port", "70000"), "--port must lie in 0..65535, got 70000"),
        (("--drain-s", "0"), "--drain-s must be"),
    ],
)
def test_bad_options_are_told(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        main(["serve", "runs/tiny", *options])


@pytest.mark.slow(days=28, group="costly")
def test_an_address_that_is_taken_is_told(run):
    service = Service(run, Engine(run, CONFIG), "tiny")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            run_server(service, host="127.0.0.1", port=port, drain_s=1, started=print)
        # Before a run is read, which takes long
        with pytest.raises(OSError, match=f"port {port} .*in use.*choose another --port"):
            serve("nowhere", port=port)
