"""A server of its own process: started for a measurement, watched, and stopped."""

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 600
"""Seconds until a server must listen."""

_NUMBER = re.compile(
    r'^jaxblt_requests_ended_total\{state="(\w+)"\} ([\d.]+)$|^jaxblt_requests_(\w+) ([\d.]+)$'
)


class Served:
    """A server that listens.

    Attributes:
      port: of its socket on this machine.
      memory: seconds since the start of the watch, and MiB of the process, each half second.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        """Begin to watch the memory of a server."""
        self._process, self.port = process, port
        self.memory: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        begun = time.monotonic()
        while not self._stop.wait(0.5):
            self.memory.append((time.monotonic() - begun, self.read_memory()))

    def read_memory(self) -> float:
        """Return the resident memory of the process in MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def read_counts(self) -> dict[str, int]:
        """Return how many requests wait, run, and have ended in each state."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        found = [match for line in lines if (match := _NUMBER.match(line))]
        return {match[1] or match[3]: int(float(match[2] or match[4])) for match in found}

    def wait_until_idle(self, within_s: float = 120.0) -> dict[str, int]:
        """Return the counts once no request waits or runs.

        Raises:
          RuntimeError: some still do after `within_s` seconds.
        """
        until = time.monotonic() + within_s
        while (counts := self.read_counts())["waiting"] + counts["running"]:
            if time.monotonic() > until:
                raise RuntimeError(
                    f"the server still has requests {within_s} s after the last client: {counts}"
                )
            time.sleep(0.2)
        return counts

    def stop(self) -> int:
        """Ask it to end, and return its status."""
        self._stop.set()
        self._thread.join()
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(WAIT_S)


@contextmanager
def serving_run(run_dir: str | None, options: Sequence[str]) -> Iterator[Served]:
    """Serve a run in a process of its own, on a free port.

    Args:
      run_dir: of the run, or the name of one that comes with jaxblt; None for a tiny model.
      options: of `jaxblt serve`.

    Raises:
      RuntimeError: it ended before it listened.
    """
    tiny = ["experiments.benchmark.served.tiny_server"]
    command = tiny if run_dir is None else ["jaxblt", "serve", run_dir]
    arguments = [sys.executable, "-m", *command, "--port", "0", *options]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield Served(process, _read_port(process))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _read_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r" at http://127\.0\.0\.1:(\d+)", line):
            return int(match[1])
    raise RuntimeError(f"the server ended with status {process.wait()} before it listened; its log is above")
