"""Training adapters of a frozen base for some seconds, and scoring them byte by byte: one program for all seeds."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmark.adapters.arms import Arm, Settings
from experiments.benchmark.adapters.mixed_text import Mix, Rows, draw_rows
from experiments.benchmark.adapters.scored import Scored, count_picks
from jaxblt.adapters import attach, join_params, split_params
from jaxblt.adapters.code.override import is_router, override_codes
from jaxblt.training.experimental.policy import is_routers
from jaxblt.training.flops import count_params

WARM_UP = 0.05
"""Share of the training in which the rate rises."""
LEAST = 1e-6
"""The least of a code's number before its logarithm."""


class Program:
    """The compiled programs of an arm: drawing parameters, some steps, and the score."""

    def __init__(self, arm: Arm, model: Any, settings: Settings) -> None:
        self.arm, self.settings, self.blocks = arm, settings, arm.adapter.blocks or 0
        self.module = attach(model, arm.adapter).build(dtype=jnp.dtype(settings.dtype))
        self.moments = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))

    def lower(self, base: Any, train: Mix, test: Mix) -> None:
        """Trace everything; `compile` may then run in a thread of its own.

        The base may be given as shapes.
        """
        key, number = jax.random.key(0), jnp.zeros((), jnp.int32)
        rates = jnp.zeros(self.settings.steps_a_call, jnp.float32)
        carried = jax.eval_shape(self._start, base, key)
        self.lowered = (
            jax.jit(self._start).lower(base, key),
            jax.jit(self._steps, donate_argnums=1).lower(base, carried, train, key, number, rates),
            jax.jit(self._score).lower(base, carried[0], test, key),
        )
        self.parameters = count_params(carried[0])[0]

    def compile(self) -> float:
        """Compile what was traced. Returns the seconds that it took."""
        begun = time.perf_counter()
        self.start, self.steps, self.scores = (lowered.compile() for lowered in self.lowered)
        return time.perf_counter() - begun

    def _start(self, base: Any, key: Any) -> tuple[Any, Any]:
        """Draw the trained part and its moments; what it shares with the base begins as the base has it."""
        with override_codes(jnp.zeros((1, 2, self.blocks))) if self.arm.labelled else nullcontext():
            drawn = nn.meta.unbox(self.module.init(key, jnp.zeros((1, 2), jnp.int32)))["params"]
        trained = _shared(split_params(drawn, self.settings.also_train)[1], base)
        return trained, self.moments.init(trained)

    def _logits(self, base: Any, trained: Any, rows: Rows) -> tuple[Any, Any]:
        """Return logits of each target, with the code, if one router makes it."""
        codes: list[Any] = []
        if self.arm.labelled:
            context = override_codes(jax.nn.one_hot(rows.domain, self.blocks, dtype=jnp.float32))
        else:
            context = _recorded(codes)
        with context:
            logits, _ = self.module.apply({"params": join_params(base, trained)}, rows.inputs)
        return logits, codes[0] if codes else None

    def _loss(self, trained: Any, base: Any, mix: Mix, rows: Rows) -> tuple[Any, Any]:
        """Return what is minimised, and the nats a byte."""
        logits, code = self._logits(base, trained, rows)
        loss = language = jnp.mean(_nats(logits, rows))
        if self.arm.imitation:
            shares = code if self.blocks else group_shares(code, mix.domains)
            right = jnp.take_along_axis(shares, rows.domain[..., None], 2)
            loss = loss - self.arm.imitation * jnp.mean(jnp.log(jnp.maximum(right, LEAST)))
        return loss, language

    def _steps(self, base: Any, carried: Any, mix: Mix, key: Any, first: Any, rates: Any) -> tuple[Any, Any]:
        """Take several steps, each on rows that its number picks. Returns bits per byte of these rows before it too."""
        settings = self.settings

        def step(carried: Any, now: Any) -> tuple[Any, Any]:
            (trained, moments), (number, rate) = carried, now
            own = jax.random.fold_in(key, number)
            drawn = draw_rows(mix, own, settings.rows, settings.length, settings.spans)
            (_, nats), gradient = jax.value_and_grad(self._loss, has_aux=True)(trained, base, mix, drawn)
            with jax.numpy_dtype_promotion("standard"):
                change, moments = self.moments.update(gradient, moments, trained)
                factors = _factors(trained, settings.router_factor)
                trained = jax.tree.map(lambda p, u, f: p - rate * f * u, trained, change, factors)
            return (trained, moments), nats / jnp.log(2.0)

        return jax.lax.scan(step, carried, (first + jnp.arange(settings.steps_a_call), rates))

    def _score(self, base: Any, trained: Any, mix: Mix, key: Any) -> tuple[Any, Rows, Any]:
        """Return nats of each target of the test rows, the rows, and which experts a bank's router picked."""
        settings, routed = self.settings, self.blocks > 0 and not self.arm.labelled
        test = draw_rows(mix, key, settings.test_rows, settings.length, settings.spans)
        batches = jax.tree.map(lambda x: x.reshape(-1, settings.rows, *x.shape[1:]), test)

        def score(rows: Rows) -> tuple[Any, Any]:
            logits, code = self._logits(base, trained, rows)
            picked = count_picks(code, rows.domain, mix.domains) if routed else None
            return _nats(logits, rows), picked

        nats, picked = jax.lax.map(score, batches)
        return nats.reshape(test.targets.shape), test, None if picked is None else jnp.sum(picked, 0)

    def scored(self, base: Any, trained: Any, mix: Mix) -> Scored:
        """Score the rows of a fixed key."""
        nats, rows, picked = jax.tree.map(np.asarray, self.scores(base, trained, mix, jax.random.key(0)))
        return Scored(nats.astype(np.float64), rows, picked)

    def train(self, base: Any, mix: Mix, seed: int) -> tuple[Any, dict[str, Any]]:
        """Train for the settings' seconds or steps.

        Returns the trained part, and the steps, bytes a second and bits per byte on the way.
        """
        settings, (init, data) = self.settings, jax.random.split(jax.random.key(seed))
        carried = jax.block_until_ready(self.start(base, init))
        begun, curve, steps = time.perf_counter(), [], 0
        while (share := self._done(steps, time.perf_counter() - begun)) < 1:
            rates = np.full(settings.steps_a_call, settings.rate * scheduled(share), np.float32)
            carried, bits = self.steps(base, carried, mix, data, np.int32(steps), rates)
            curve.append(float(jnp.mean(bits)))
            steps += settings.steps_a_call
        seconds = time.perf_counter() - begun
        rate = steps * settings.rows * settings.length / seconds
        found = {"seconds": seconds, "steps": steps, "bytes_per_second": rate, "curve": curve}
        return carried[0], found

    def _done(self, steps: int, seconds: float) -> float:
        """Return the share of the training that is done."""
        settings = self.settings
        return seconds / settings.seconds if settings.steps is None else steps / settings.steps


def group_shares(code: Any, groups: int) -> Any:
    """Return shares of groups of neighbouring ranks: a softmax of the means of their numbers, [B, T, groups]."""
    return jax.nn.softmax(jnp.mean(code.reshape(*code.shape[:2], groups, -1), -1), -1)


def scheduled(share: float) -> float:
    """Return the factor of the peak rate by the share of training that is done: linear up, then a cosine to 0."""
    if share < WARM_UP:
        return (share + WARM_UP / 10) / (1.1 * WARM_UP)
    return 0.5 * (1 + float(np.cos(np.pi * (share - WARM_UP) / (1 - WARM_UP))))


def _recorded(codes: list[Any]) -> AbstractContextManager[Any]:
    """Return a context in which the code of every router is added to a list."""

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        found = call(*args, **options)
        if is_router(context):
            codes.append(found[0])
        return found

    return nn.intercept_methods(record)


def _nats(logits: Any, rows: Rows) -> Any:
    """Return the nats of each target."""
    chosen = jnp.take_along_axis(logits, rows.targets[..., None], 2)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _shared(trained: Any, base: Any) -> Any:
    if not isinstance(trained, Mapping):
        return base
    return {name: _shared(below, base[name]) if name in base else below for name, below in trained.items()}


def _factors(trained: Any, router: float) -> Any:
    """Return a factor of the learning rate for each parameter."""

    def factor(path: tuple[Any, ...], leaf: Any) -> float:
        return router if is_routers(path) else 1.0

    return jax.tree_util.tree_map_with_path(factor, trained)


def compile_all(
    programs: Mapping[str, Program], base: Any, train: Mix, test: Mix, report: Callable[[str], None]
) -> None:
    """Trace the programs one after another and compile them side by side.

    Args:
      programs: by arm.
      base: their frozen parameters.
      train: what is trained on.
      test: what is scored.
      report: prints a line.
    """
    from concurrent.futures import ThreadPoolExecutor

    begun = time.perf_counter()
    for program in programs.values():
        program.lower(base, train, test)
    report(f"traced {len(programs)} programs in {time.perf_counter() - begun:.1f} s")
    with ThreadPoolExecutor(4) as pool:
        seconds = dict(zip(programs, pool.map(Program.compile, programs.values()), strict=True))
    taken = {name: round(value, 1) for name, value in seconds.items()}
    report(f"compiled in {time.perf_counter() - begun:.1f} s: {taken}")
