"""Serving a routed adapter: a guard that falls back to the base, and what is watched of codes and latencies.

`Guard` lives on the host and decides between calls. The program is compiled once: `guarded` takes what the guard
decided as an argument, and puts the fallback in place of codes.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.override import intercepted, is_router
from jaxblt.side_outputs import Sown, sow_metric
from jaxblt.validation import check_bounds, check_fields

logger = logging.getLogger(__name__)

Breaker = Literal["closed", "open", "half-open"]
FIGURES = "code_figures"
"""The metric that figures of routers in blocks are sown as."""


@flax.struct.dataclass
class CodeFigures:
    """Figures of the codes of one call, as scalars; holes and padding do not count.

    Attributes:
      entropy: of the sizes of a code's numbers as shares, mean over tokens, in nats.
      rms: root mean square over numbers, mean over tokens.
      active: share of numbers that are not 0.
      flips: share of neighbouring tokens of a document whose largest number is another's.
      replaced: rows whose code was not finite and became the fallback.
      tokens: that count; without any the means are 0.
    """

    entropy: Float[Array, ""]
    rms: Float[Array, ""]
    active: Float[Array, ""]
    flips: Float[Array, ""]
    replaced: Float[Array, ""]
    tokens: Float[Array, ""]


def code_figures(
    code: Float[Array, "B T E"], replaced: Bool[Array, "B"], segment_ids: Int[Array, "B T"] | None = None
) -> CodeFigures:
    """Return the figures of codes that `Telemetry` watches.

    Args:
      code: of each token.
      replaced: rows whose code became the fallback.
      segment_ids: document of each token, 0 for holes and padding; None for rows of one document each.
    """
    ids = jnp.ones(code.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    content = ids > 0
    pairs = content[:, 1:] & (ids[:, 1:] == ids[:, :-1])
    size = jnp.abs(code)
    share = size / jnp.maximum(jnp.sum(size, -1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    logs = jnp.log(jnp.where(share > 0, share, 1.0))
    largest = jnp.argmax(size, -1)
    return CodeFigures(
        entropy=-_mean(jnp.sum(share * logs, -1), content),
        rms=_mean(jnp.sqrt(jnp.mean(code * code, -1)), content),
        active=_mean(jnp.mean((code != 0).astype(jnp.float32), -1), content),
        flips=_mean(largest[:, 1:] != largest[:, :-1], pairs),
        replaced=jnp.sum(replaced, dtype=jnp.float32),
        tokens=jnp.sum(content, dtype=jnp.float32),
    )


def _mean(x: Array, told: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Return the mean over the places that are told; 0 without any."""
    return jnp.sum(x, where=told, dtype=jnp.float32) / jnp.maximum(jnp.sum(told, dtype=jnp.float32), 1)


def guarded(
    fall_back: Bool[Array, ""], fallback: float, figures: list[CodeFigures]
) -> AbstractContextManager[Any]:
    """Make a context in which codes are the fallback while a guard says so, and in rows whose code is not finite.

    Figures of routers in blocks leave scan and remat as metrics: `apply(..., mutable=["metrics"])`, and `block_figures`
    of what it sows.

    Args:
      fall_back: `Guard.falls_back()`, an argument of the program, so that both ways are one program.
      fallback: every number of that code: 0 for the base, 1 for the static adapter, 1/E for a bank's even share.
      figures: gets those of each router of a stack, to be returned by the function that is compiled.

    Raises:
      ValueError: when it meets a router of a block and metrics are not mutable, so that its figures would be lost.
    """

    def intercept(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        if not is_router(context):
            return call(*args, **options)
        router = context.module
        if router.adapter.of_blocks and not router.is_mutable_collection("metrics"):
            raise ValueError(
                "guarded sows the figures of routers in blocks (RouterConfig.reads = 'block') as metrics, and metrics "
                "are not mutable: call apply(..., mutable=['metrics']) and read block_figures of its second result"
            )
        code, state = call(*args, **options)
        broken = ~jnp.all(jnp.isfinite(code), (1, 2))
        if state is not None:  # in such calls the router replaced them itself
            broken = broken | (state.replaced > options["state"].replaced)
        safe = jnp.where(broken[:, None, None] | fall_back, jnp.asarray(fallback, code.dtype), code)
        found = code_figures(safe, broken, options.get("segment_ids"))
        if router.adapter.of_blocks:
            sow_metric(router, FIGURES, jnp.stack(jax.tree.leaves(found)))
        else:
            figures.append(found)
        return safe, state

    return intercepted("guarded", intercept)


def block_figures(side: Mapping[str, Any]) -> list[CodeFigures]:
    """Return the figures of each router in a block, from what a guarded pass sowed; for `Telemetry.record`."""
    found: list[CodeFigures] = []
    for sown in _sown(side, FIGURES):
        each = np.asarray(sown.value).reshape(-1, sown.value.shape[-1])
        found += [CodeFigures(*numbers) for numbers in each]
    return found


def mean_violations(side: Mapping[str, Any]) -> float | None:
    """Return the share of tokens over a governor's bound, mean over sites; None without a governor."""
    rates = [np.mean(sown.value) for sown in _sown(side, "violations")]
    return float(np.mean(rates)) if rates else None


def _sown(side: Mapping[str, Any], name: str) -> list[Sown]:
    """Return the metrics of a name."""
    leaves = jax.tree_util.tree_leaves_with_path(
        side.get("metrics", {}), is_leaf=lambda x: isinstance(x, Sown)
    )
    return [leaf for path, leaf in leaves if any(getattr(entry, "key", None) == name for entry in path)]


@dataclass
class Guard:
    """A circuit breaker: calls that fail or are too slow open it, and while it is open the adapter is off.

    Closed, `patience` calls in a row above `factor` times the baseline open it, or one that fails. Open, it waits
    `cool_down` seconds. Half-open, one call tries the adapter: it closes the breaker if it is fast enough, else it
    opens it again.

    Attributes:
      baseline: seconds of a call without adapter, such as the median of a warm-up.
      factor: above which a call counts as slow.
      patience: slow calls in a row.
      cool_down: seconds in the open state.
      clock: seconds, from any zero.
      state: where the breaker is.
      opened: how often it opened.
      failed: calls that raised, and did not with the fallback.
    """

    baseline: float
    factor: float = 2.0
    patience: int = 3
    cool_down: float = 10.0
    clock: Callable[[], float] = time.monotonic
    state: Breaker = field(default="closed", init=False)
    opened: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    _slow: int = field(default=0, init=False, repr=False)
    _since: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "baseline", "factor", "cool_down", above=0)
        check_bounds(self, "patience", least=1)

    def serve[T](self, call: Callable[[bool], T]) -> T:
        """Return what `call(falls back)` returns, timed; where it raises, what it returns with the fallback.

        An error that the fallback raises too is no fault of the adapter: it is raised, and changes nothing.
        """
        fell_back, began = self.falls_back(), self.clock()
        try:
            result = call(fell_back)
        except Exception as error:
            if fell_back:
                raise
            result = call(True)
            logger.warning(
                "a call with the adapter failed, and one with its fallback did not", exc_info=error
            )
            self.failed += 1
            self._open()
            return result
        self.record(self.clock() - began)
        return result

    def falls_back(self) -> bool:
        """Return whether the next call is to use the fallback; ask once a call, before it."""
        if self.state == "open" and self.clock() - self._since >= self.cool_down:
            self.state = "half-open"
        return self.state == "open"

    def record(self, seconds: float) -> None:
        """Record how long the call took; calls with the fallback change nothing.

        Raises:
          ValueError: the seconds are negative or NaN.
        """
        _check_seconds(seconds)
        if self.state == "open":
            return
        self._slow = self._slow + 1 if seconds > self.factor * self.baseline else 0
        if self._slow == 0:
            self.state = "closed"
        elif self.state == "half-open" or self._slow >= self.patience:
            self._open()

    def _open(self) -> None:
        self.state, self._since, self._slow = "open", self.clock(), 0
        self.opened += 1


def _check_seconds(seconds: float) -> None:
    """Raise ValueError for what is no duration: NaN is not above any limit, and would pass for fast."""
    if not seconds >= 0:
        raise ValueError(
            f"seconds must be 0 or more, got {seconds!r}: give what a call took by one clock, end minus start"
        )


@dataclass(frozen=True)
class Limits:
    """Limits of figures, beyond which there is an alarm; None watches nothing.

    Attributes:
      least_entropy: of codes in nats: below it the router has settled on one block.
      most_rms: of codes.
      most_flips: share of tokens.
      most_p95, most_p99: seconds of a call.
      least_hits: share of tokens whose caches a call could take from an earlier one.
      most_violations: share of tokens over a governor's bound.
    """

    least_entropy: float | None = None
    most_rms: float | None = None
    most_flips: float | None = None
    most_p95: float | None = None
    most_p99: float | None = None
    least_hits: float | None = None
    most_violations: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "least_entropy", "most_rms", above=0, why=": None watches nothing")
        check_bounds(self, "least_hits", above=0, most=1, why=": a share, None watches nothing")
        check_bounds(self, "most_flips", "most_violations", least=0, most=1)
        check_bounds(self, "most_p95", "most_p99", above=0, why=": seconds, None watches nothing")


class Telemetry:
    """Figures of the latest calls, and alarms.

    Args:
      window: calls that are kept.
      limits: of the alarms.
    """

    def __init__(self, window: int = 256, limits: Limits = Limits()) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}: it counts the calls that are kept")
        self.limits, self.replaced = limits, 0
        self._calls: deque[tuple[float, dict[str, float]]] = deque(maxlen=window)

    def record(
        self,
        seconds: float,
        figures: Sequence[CodeFigures],
        *,
        hits: float | None = None,
        violations: float | None = None,
    ) -> None:
        """Keep what is known of a call (waits for its figures; those of no tokens are left out).

        Args:
          seconds: that it took.
          figures: of its stacks, and of routers in blocks (`block_figures`).
          hits: share of its prompts' tokens whose caches earlier ones made (`jaxblt.adapters.files.shared_caches`).
          violations: share of tokens over a governor's bound (`mean_violations`).

        Raises:
          ValueError: the seconds are negative or NaN, or a share does not lie in 0..1.
        """
        _check_seconds(seconds)
        shares = {"hits": hits, "violations": violations}
        for name, share in shares.items():
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {share!r}: it is a share of tokens")
        told = [f for f in figures if f.tokens > 0]
        names = ("entropy", "rms", "active", "flips") if told else ()
        means = {name: float(np.mean([getattr(f, name) for f in told])) for name in names}
        self.replaced += int(sum(float(f.replaced) for f in figures))
        means |= {name: share for name, share in shares.items() if share is not None}
        self._calls.append((seconds, means))

    def report(self) -> dict[str, float]:
        """Return means over the calls that have a figure, percentiles of seconds, and rows replaced since the start.

        {} before a call.
        """
        if not self._calls:
            return {}
        seconds, figures = zip(*self._calls, strict=True)
        names = dict.fromkeys(name for each in figures for name in each)
        found = {name: float(np.mean([each[name] for each in figures if name in each])) for name in names}
        percentiles = np.percentile(seconds, [50, 95, 99])
        found |= {f"p{n}": float(p) for n, p in zip((50, 95, 99), percentiles, strict=True)}
        return found | {"replaced": float(self.replaced), "calls": float(len(seconds))}

    def alarms(self) -> list[str]:
        """Return a line for each alarm: a figure, its value and its limit. What no call has raises none."""
        found, limits = self.report(), self.limits
        most = {
            "rms": limits.most_rms,
            "flips": limits.most_flips,
            "violations": limits.most_violations,
            "p95": limits.most_p95,
            "p99": limits.most_p99,
        }
        least = {"entropy": limits.least_entropy, "hits": limits.least_hits}
        lines = [
            f"{name} is {found[name]:.4g}, above {limit:.4g}"
            for name, limit in most.items()
            if limit is not None and name in found and not found[name] <= limit
        ]
        lines += [
            f"{name} is {found[name]:.4g}, below {limit:.4g}"
            for name, limit in least.items()
            if limit is not None and name in found and not found[name] >= limit
        ]
        if self.replaced:
            lines.append(f"{self.replaced} rows had a code that is not finite")
        return lines
