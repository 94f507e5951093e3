"""The numbers of a service, in Prometheus's text format."""

from collections.abc import Iterator
from typing import Any

from jaxblt.inference.engine import Engine

FIRST_BYTE_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Edges of the histogram of times to the first bytes, in seconds."""


class Metrics:
    """Numbers of an engine and of the responses over it.

    Attributes:
      first_byte: a histogram of seconds from a request to its first bytes.
      responses: a counter of responses by path and status.
    """

    def __init__(self, engine: Engine) -> None:
        """Begin at zero, in a registry of its own."""
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._engine, self._registry = engine, CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry, "namespace": "jaxblt"}
        self.first_byte = Histogram(
            "first_byte_seconds", "From a request to its first bytes.", buckets=FIRST_BYTE_S, **made
        )
        self.responses = Counter("responses", "Responses.", ("path", "status"), **made)
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield the engine's numbers, as a registry asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._engine.stats
        for name, value in (("waiting", stats.waiting), ("running", stats.running)):
            yield GaugeMetricFamily(f"jaxblt_requests_{name}", f"Requests {name}.", value)
        ended = CounterMetricFamily("jaxblt_requests_ended", "Requests by how they ended.", labels=["state"])
        for state, count in stats.ended.items():
            ended.add_metric([state], count)
        yield ended
        data = CounterMetricFamily("jaxblt_bytes", "Bytes by kind.", labels=["kind"])
        for kind in ("prompt", "known", "drawn", "drafted", "accepted"):
            data.add_metric([kind], getattr(stats, f"{kind}_bytes"))
        yield data
        yield CounterMetricFamily("jaxblt_rounds", "Rounds of the engine.", stats.rounds)

    def write(self) -> bytes:
        """Return all numbers as text."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
