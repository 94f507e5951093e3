"""The server as a process: a socket, and an end in good order at SIGTERM."""

import math
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxblt.inference.server.app import make_app
from jaxblt.inference.server.framing import json_protocol
from jaxblt.inference.server.service import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.5
"""Seconds after which the main thread looks whether the server's thread still lives."""


def run_server(
    service: Service, *, host: str, port: int, drain_s: float, started: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then drain: be unready, finish what runs, and return.

    Call it in the main thread.

    Args:
      service: with an engine that was started; it is closed.
      host: address to listen at.
      port: 0 takes a free one.
      drain_s: seconds after which requests that still run are cancelled.
      started: called with the server's address once it listens.

    Raises:
      OSError: the address is taken.
      RuntimeError: the server ended by itself.
    """
    import uvicorn

    listener = listen(host, port)
    options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off"}
    options |= {"http": json_protocol(), "timeout_graceful_shutdown": math.ceil(drain_s)}
    config = uvicorn.Config(make_app(service), **options)
    server, stop = uvicorn.Server(config), threading.Event()
    # Keep Uvicorn off the main thread: there it takes the signals, and dies of them once it has shut down
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in SIGNALS}
    try:
        thread.start()
        started(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        while thread.is_alive() and not stop.wait(POLL_S):
            pass
        died = not thread.is_alive()
        service.drain(drain_s)
        server.should_exit = True
        # Wait for calls of the run too: whoever exits under them gets a traceback, and waits all the same
        thread.join()
    finally:
        _restore(before)
        listener.close()
    if died:
        raise RuntimeError("the server ended by itself; its log says why")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
      OSError: the address is taken, or is none of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise OSError(
            f"cannot listen at host {host!r}, port {port} ({said}): choose another --port, 0 for a free one, or "
            "another --host"
        ) from error


def _restore(handlers: dict[Any, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
