"""The learning rate by step: a warm-up, then one of four shapes."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import optax

from jaxblt.validation import check_bounds, check_fields, check_read


@dataclass(frozen=True)
class ScheduleConfig:
    """A linear warm-up, and what the learning rate does then.

    Attributes:
      learning_rate: the peak of the learning rate.
      per_rows: rows of a step that `learning_rate` is meant for, such as 256: then the peak is learning_rate · rows /
        per_rows (Goyal et al., 1706.02677). None takes the rate for any number of rows.
      warmup_steps: steps of linear rise from 0 to the peak.
      decay_steps: step at which the floor is reached; None takes the run's number of steps.
      floor: the last learning rate as a fraction of the peak.
      schedule: "cosine" or "linear" decay to the floor; "wsd" stays at the peak and decays linearly at the end
        (warm-up, stable, decay; Hu et al., 2404.06395, sec. 4); "constant" stays.
      decay_share: of "wsd", share of `decay_steps` in which the rate decays.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    decay_steps: int | None = None
    floor: float = 0.1
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay_share: float = 0.2
    per_rows: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "learning_rate", above=0)
        check_bounds(self, "per_rows", least=1, why=": None takes the rate for any number of rows")
        check_bounds(self, "warmup_steps", least=0)
        check_bounds(self, "decay_steps", least=1, why=": None takes the run's steps")
        check_bounds(self, "decay_share", above=0, most=1, why=": it is a share of the steps")
        check_bounds(self, "floor", least=0, most=1, why=": it is a fraction of the peak")
        self._check_read("decay_share", "schedule='wsd'", self.schedule == "wsd")
        for name in ("floor", "decay_steps"):
            self._check_read(name, "schedule='cosine', 'linear' or 'wsd'", self.schedule != "constant")

    def check(self, recipe: Any) -> None:
        """Check that the warm-up ends before the decay of a run of `recipe.train.steps` steps."""
        make_schedule(self, recipe.train.steps)

    def _check_read(self, name: str, needed: str, is_read: bool) -> None:
        check_read(self, name, needed=needed, is_read=is_read, part="optimizer")


def for_rows[S: ScheduleConfig](config: S, rows: int) -> S:
    """Return the config whose peak is that of steps of `rows` rows; micro-batches of a step count together."""
    if config.per_rows is None:
        return config
    return replace(config, learning_rate=config.learning_rate * rows / config.per_rows, per_rows=None)


def make_schedule(config: ScheduleConfig, steps: int) -> optax.Schedule:
    """Make the learning rate by update t: p t/w for t < w; then, with u = (t-w)/(e-w) from 0 to 1 and 1 from e on:

    cosine p (f + (1-f) (1+cos(pi u))/2), linear p (1 - (1-f) u), constant p; wsd p until (1-s) e, then linear to p f.

    p is the peak, w the warm-up, e the decay's end, f the floor, s the share in which "wsd" decays.

    Args:
      config: of the optimiser; `per_rows` is None, see `for_rows`.
      steps: of the run; the decay's end unless `config.decay_steps` says otherwise.

    Raises:
      ValueError: the warm-up does not end before the decay does, or before that of "wsd" begins.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    end = steps if config.decay_steps is None else config.decay_steps
    if warmup >= end:
        raise ValueError(f"warmup_steps = {warmup} must be less than the decay's end, step {end}")
    last = config.floor * peak
    rise = optax.linear_schedule(0.0, peak, warmup)
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, end, end_value=last)
    elif config.schedule == "linear":
        schedule = optax.join_schedules([rise, optax.linear_schedule(peak, last, end - warmup)], [warmup])
    elif config.schedule == "constant":
        schedule = optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
    else:
        begin = end - round(config.decay_share * end)
        if begin < warmup:
            raise ValueError(
                f"warmup_steps = {warmup} must be at most {begin}, where the decay of schedule 'wsd' begins: lower it, "
                f"or decay_share = {config.decay_share}"
            )
        parts = [rise, optax.constant_schedule(peak), optax.linear_schedule(peak, last, end - begin)]
        schedule = optax.join_schedules(parts, [warmup, begin])
    return lambda count: schedule(jnp.asarray(count, jnp.float32))
