"""Serving a routed adapter: a guard that falls back to the base, and what is watched of codes and latencies.

`Guard` lives on the host and decides between calls. The program is compiled once: `guarded` takes what the guard
decided as an argument, and puts the fallback in place of codes.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxblt.adapters.given import is_router
from jaxblt.validation import check_bounds, check_fields

Breaker = Literal["closed", "open", "half-open"]


@flax.struct.dataclass
class CodeFigures:
    """Of the codes of one call, as scalars; holes and padding have codes of 0 and count like tokens.

    Attributes:
      entropy: of the sizes of a code's numbers as shares, mean over tokens, in nats.
      rms: root mean square over numbers, mean over tokens.
      active: share of numbers that are not 0.
      flips: share of neighbouring tokens whose largest number is another's.
      replaced: rows whose code was not finite and became the fallback.
    """

    entropy: Float[Array, ""]
    rms: Float[Array, ""]
    active: Float[Array, ""]
    flips: Float[Array, ""]
    replaced: Float[Array, ""]


def code_figures(code: Float[Array, "B T E"], replaced: Bool[Array, "B"]) -> CodeFigures:
    """What is watched of codes."""
    size = jnp.abs(code)
    share = size / jnp.maximum(jnp.sum(size, -1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    logs = jnp.log(jnp.where(share > 0, share, 1.0))
    largest = jnp.argmax(size, -1)
    return CodeFigures(
        entropy=-jnp.mean(jnp.sum(share * logs, -1)),
        rms=jnp.mean(jnp.sqrt(jnp.mean(code * code, -1))),
        active=jnp.mean((code != 0).astype(jnp.float32)),
        flips=jnp.mean((largest[:, 1:] != largest[:, :-1]).astype(jnp.float32))
        if code.shape[1] > 1
        else jnp.zeros(()),
        replaced=jnp.sum(replaced, dtype=jnp.float32),
    )


def guarded(
    fall_back: Bool[Array, ""], fallback: float, figures: list[CodeFigures]
) -> AbstractContextManager[Any]:
    """A context in which codes are the fallback while a guard says so, and in rows whose code is not finite.

    Args:
      fall_back: `Guard.falls_back()`, an argument of the program, so that both ways are one program.
      fallback: every number of that code: 0 for the base, 1 for the static adapter, 1/E for a bank's even share.
      figures: gets those of each router, to be returned by the function that is compiled.

    Raises:
      ValueError: when it meets a router of a block, whose figures cannot leave the block's scan or remat.
    """

    def intercept(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        if not is_router(context):
            return call(*args, **options)
        if context.module.adapter.of_blocks:
            raise ValueError(
                "guarded watches the router of a stack, and RouterConfig.reads = 'block' has one in each block: set "
                "reads='stack', or turn rows off by choose_adapters"
            )
        code, state = call(*args, **options)
        broken = ~jnp.all(jnp.isfinite(code), (1, 2))
        if state is not None:  # in such calls the router replaced them itself
            broken = broken | (state.replaced > options["state"].replaced)
        safe = jnp.where(broken[:, None, None] | fall_back, jnp.asarray(fallback, code.dtype), code)
        figures.append(code_figures(safe, broken))
        return safe, state

    return nn.intercept_methods(intercept)


@dataclass
class Guard:
    """A circuit breaker: calls that are too slow open it, and while it is open the adapter is off.

    Closed, `patience` calls in a row above `factor` times the baseline open it. Open, it waits `cool_down` seconds.
    Half-open, one call tries the adapter: it closes the breaker if it is fast enough, else it opens it again.

    Attributes:
      baseline: seconds of a call without adapter, such as the median of a warm-up.
      factor: above which a call counts as slow.
      patience: slow calls in a row.
      cool_down: seconds in the open state.
      clock: seconds, from any zero.
      state: where the breaker is.
      opened: how often it opened.
    """

    baseline: float
    factor: float = 2.0
    patience: int = 3
    cool_down: float = 10.0
    clock: Callable[[], float] = time.monotonic
    state: Breaker = field(default="closed", init=False)
    opened: int = field(default=0, init=False)
    _slow: int = field(default=0, init=False, repr=False)
    _since: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_bounds(self, "baseline", "factor", "cool_down", above=0)
        check_bounds(self, "patience", least=1)

    def falls_back(self) -> bool:
        """Whether the next call is to use the fallback; ask once a call, before it."""
        if self.state == "open" and self.clock() - self._since >= self.cool_down:
            self.state = "half-open"
        return self.state == "open"

    def record(self, seconds: float) -> None:
        """Says how long the call took; calls with the fallback change nothing."""
        if self.state == "open":
            return
        self._slow = self._slow + 1 if seconds > self.factor * self.baseline else 0
        if self._slow == 0:
            self.state = "closed"
        elif self.state == "half-open" or self._slow >= self.patience:
            self.state, self._since, self._slow = "open", self.clock(), 0
            self.opened += 1


@dataclass(frozen=True)
class Limits:
    """What raises an alarm; None watches nothing.

    Attributes:
      least_entropy: of codes in nats: below it the router has settled on one block.
      most_rms: of codes.
      most_flips: share of tokens.
      most_p99: seconds of a call.
    """

    least_entropy: float | None = None
    most_rms: float | None = None
    most_flips: float | None = None
    most_p99: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)


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

    def record(self, seconds: float, figures: Sequence[CodeFigures]) -> None:
        """Keeps a call's seconds and the figures of its stacks (waits for them)."""
        names = ("entropy", "rms", "active", "flips")
        means = {name: float(np.mean([getattr(f, name) for f in figures])) for name in names}
        self.replaced += int(sum(float(f.replaced) for f in figures))
        self._calls.append((seconds, means))

    def report(self) -> dict[str, float]:
        """Means of the codes' figures, percentiles of seconds, and rows replaced since the start; {} before a call."""
        if not self._calls:
            return {}
        seconds, figures = zip(*self._calls, strict=True)
        found = {name: float(np.mean([f[name] for f in figures])) for name in figures[0]}
        percentiles = np.percentile(seconds, [50, 95, 99])
        found |= {f"p{n}": float(p) for n, p in zip((50, 95, 99), percentiles, strict=True)}
        return found | {"replaced": float(self.replaced), "calls": float(len(seconds))}

    def alarms(self) -> list[str]:
        """One line each: a figure, its value and its limit."""
        found, limits = self.report(), self.limits
        if not found:
            return []
        lines = [
            f"{name} is {found[name]:.4g}, above {most:.4g}"
            for name, most in (
                ("rms", limits.most_rms),
                ("flips", limits.most_flips),
                ("p99", limits.most_p99),
            )
            if most is not None and not found[name] <= most
        ]
        if limits.least_entropy is not None and not found["entropy"] >= limits.least_entropy:
            lines.append(f"entropy is {found['entropy']:.4g}, below {limits.least_entropy:.4g}")
        if self.replaced:
            lines.append(f"{self.replaced} rows had a code that is not finite")
        return lines
