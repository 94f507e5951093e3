"""A server under more load than it can bear: python -m experiments.benchmark real_load --out FILE."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save
from experiments.benchmark.served.clients import Mix, Told, ask
from experiments.benchmark.served.served_process import Served, serving_run

ENDS = ("finished", "cancelled", "expired", "failed", "refused")
"""States of the server in which a request that it has read ends."""


def real_load(
    out: str = "runs/benchmark/real_load.json",
    run_dir: str | None = "english",
    requests: int = 2000,
    factors: tuple[float, ...] = (0.5, 1.0, 3.0),
    lane: str = "64x8192",
    max_waiting: int = 64,
    prompt_bytes: int = 256,
    new_bytes: int = 64,
    probe: int = 256,
    within_s: float = 300.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Send requests at random times to a server of its own process: what became of them, delays, memory.

    First as many clients as there are rows twice ask one request after another: that is the capacity. Then requests
    come by a Poisson process, at each factor of the capacity. Of the clients 5 % leave behind the first bytes, 5 %
    read slowly, and 2 % send what is no request. The client's account is compared with the server's.

    Args:
      out: JSON file to write.
      run_dir: a run, or the name of one that comes with jaxblt; None for a tiny model with drawn parameters.
      requests: at each factor.
      factors: of the capacity.
      lane: rows and bytes of each.
      max_waiting: requests that may wait for a row.
      prompt_bytes, new_bytes: of a request at the most; at least a quarter.
      probe: requests that the capacity is measured with.
      within_s: seconds after which a client gives up.
      seed: of the requests and their times.

    Raises:
      RuntimeError: a request has no account, or ended otherwise than it should.
    """
    mix = Mix(prompt_bytes=prompt_bytes, new_bytes=new_bytes)
    options = ["--lanes", lane, "--max-waiting", str(max_waiting)]
    begun = time.monotonic()
    with serving_run(run_dir, options) as served:
        found: dict[str, Any] = {"run": run_dir, "lane": lane, "max_waiting": max_waiting, "mix": asdict(mix)}
        found |= {"start_seconds": time.monotonic() - begun, "requests": requests}
        drive = _Driver(served, mix, within_s, random.Random(seed))
        capacity, rate = asyncio.run(drive.measure_capacity(probe, 2 * int(lane.partition("x")[0])))
        found |= {"capacity_requests_per_second": capacity, "capacity_bytes_per_second": rate, "levels": []}
        for factor in factors:
            found["levels"].append(drive.run_level(factor, capacity, requests))
            save("real_load", out, found)
        found["memory_mib"] = _sum_up(served.memory)
        found["status_at_the_end"] = served.stop()
    save("real_load", out, found)
    wrong = [level["factor"] for level in found["levels"] if level["unaccounted"] or level["failed"]]
    if wrong or found["status_at_the_end"]:
        raise RuntimeError(f"requests at {wrong} times the capacity ended as they should not: see {out}")
    return found


class _Driver:
    """The clients of a server."""

    def __init__(self, served: Served, mix: Mix, within_s: float, choose: random.Random) -> None:
        from jaxblt.data import load_sample

        self._served, self._mix, self._within_s, self._choose = served, mix, within_s, choose
        self._text = load_sample("book").decode("ascii", "ignore")

    async def measure_capacity(self, count: int, clients: int) -> tuple[float, float]:
        """Return requests and new bytes a second of good clients that never wait themselves."""
        bodies = [self._mix.draw_body("good", self._text, self._choose) for _ in range(count)]
        told: list[Told] = []

        async def work() -> None:
            while bodies:
                told.append(await ask(self._served.port, "good", bodies.pop(), self._within_s))

        begun = time.monotonic()
        await asyncio.gather(*(work() for _ in range(clients)))
        seconds = time.monotonic() - begun
        if wrong := [one for one in told if one.outcome != "finished"]:
            raise RuntimeError(f"{len(wrong)} of {count} requests of the probe were not answered: {wrong[0]}")
        return count / seconds, sum(one.drawn for one in told) / seconds

    def run_level(self, factor: float, capacity: float, count: int) -> dict[str, Any]:
        """Return the figures of `count` requests at a factor of the capacity."""
        before, memory = self._served.wait_until_idle(), self._served.read_memory()
        begun = time.monotonic()
        told, late = asyncio.run(self._send(factor * capacity, count))
        after = self._served.wait_until_idle()
        ended = {state: after.get(state, 0) - before.get(state, 0) for state in ENDS}
        figures: dict[str, Any] = {"factor": factor, "offered_per_second": factor * capacity}
        figures |= {"seconds": time.monotonic() - begun, "server_mib": [memory, self._served.read_memory()]}
        # A client that is late itself measures delays that are not the server's
        figures["client_late_ms"] = percentiles(late)
        return figures | _account(told, ended, count) | _delays(told)

    async def _send(self, rate: float, count: int) -> tuple[list[Told], list[float]]:
        """Send requests whose times are a Poisson process; return how late this process woke up, too."""
        late: list[float] = []
        watch = asyncio.create_task(_watch_lateness(late))
        tasks = []
        for kind in self._mix.draw_kinds(count, self._choose):
            body = self._mix.draw_body(kind, self._text, self._choose)
            tasks.append(asyncio.create_task(ask(self._served.port, kind, body, self._within_s)))
            await asyncio.sleep(self._choose.expovariate(rate))
        told = await asyncio.gather(*tasks)
        watch.cancel()
        return told, late


async def _watch_lateness(late: list[float]) -> None:
    """Sleep for 10 ms again and again, and note by how much longer it took."""
    while True:
        begun = time.monotonic()
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - begun - 0.01)


def _account(told: Sequence[Told], ended: dict[str, int], count: int) -> dict[str, Any]:
    """Compare the clients' account with the server's."""
    outcomes = Counter(one.outcome for one in told)
    kinds = {kind: dict(Counter(one.outcome for one in told if one.kind == kind)) for kind in _kinds(told)}
    # A client may leave while its last bytes are on their way, so either side may have ended such a request
    missing = abs(count - outcomes["malformed"] - sum(ended.values())) + abs(
        outcomes["refused"] - ended["refused"]
    )
    missing += max(0, outcomes["finished"] - ended["finished"])
    strayed = [one for one in told if (one.outcome == "malformed") != (one.kind == "malformed")]
    failed = [one for one in told if one.outcome == "failed"]
    return {
        "outcomes": dict(outcomes),
        "by_kind": kinds,
        "server_ended": ended,
        "unaccounted": missing + len(strayed) + abs(count - len(told)),
        "failed": len(failed),
        "errors": sorted({f"{one.status} {one.error}" for one in failed})[:5],
    }


def _kinds(told: Sequence[Told]) -> list[str]:
    return sorted({one.kind for one in told})


def _delays(told: Sequence[Told]) -> dict[str, Any]:
    """Return percentiles of delays in milliseconds; first bytes and gaps are those of good clients."""
    good = [one for one in told if one.kind == "good"]
    refused = [one.status_s for one in told if one.outcome == "refused"]
    return {
        "first_byte_ms": percentiles([one.first_s for one in good if one.first_s is not None]),
        "gap_ms": percentiles([gap for one in good for gap in one.gaps]),
        "refusal_ms": percentiles(refused),
        "malformed_ms": percentiles([one.status_s for one in told if one.outcome == "malformed"]),
        "refusals_within_50_ms": sum(seconds < 0.05 for seconds in refused),
        "new_bytes": sum(one.drawn for one in told),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return count, median, 95th and 99th percentile and maximum in milliseconds; None of nothing."""
    if not seconds:
        return None
    p50, p95, p99 = np.percentile(np.asarray(seconds), [50, 95, 99]) * 1e3
    return {"count": len(seconds), "p50": p50, "p95": p95, "p99": p99, "max": max(seconds) * 1e3}


def _sum_up(memory: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the largest memory in each eighth of the time, and what the last quarter has more than the second."""
    values = [mib for _, mib in memory]
    parts = [float(np.max(part)) for part in np.array_split(values, 8) if len(part)]
    halves = np.array_split(values, 4)
    growth = float(np.median(halves[3]) - np.median(halves[1]))
    return {"by_eighth": parts, "growth": growth, "share": growth / float(np.median(halves[1]))}
