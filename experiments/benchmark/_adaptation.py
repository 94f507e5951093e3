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

from experiments.benchmark._arms import Arm, Settings
from experiments.benchmark._mix import Mix, Rows
from experiments.benchmark._reviews import Reviews
from experiments.benchmark._scored import Scored, count_picks
from jaxblt.adapters import attach, join_params, split_params
from jaxblt.adapters.draw import POLICY, choices
from jaxblt.adapters.given import given, is_router
from jaxblt.adapters.params import routers
from jaxblt.data.batch import Batch
from jaxblt.training.acting import acting_params, keep_routers
from jaxblt.training.flops import count_params
from jaxblt.training.policy import is_routers, surrogate
from jaxblt.training.reference import divergence
from jaxblt.training.step import Task, find_entropies

WARM_UP = 0.05
"""Share of the training in which the rate rises."""
FROZEN = "frozen"
"""Where a base with patches holds the frozen trees of its run."""
LEAST = 1e-6
"""Of a code's number before its logarithm."""


class Program:
    """What is compiled for an arm: drawing parameters, some steps, and the score.

    A base with patches has its `Task`. What entropies are made of is in its parameters then, under `FROZEN`.
    """

    def __init__(self, arm: Arm, model: Any, settings: Settings, task: Task | None = None) -> None:
        config = model if arm.adapter is None else attach(model, arm.adapter)
        self.arm, self.settings, self.blocks = arm, settings, (arm.adapter and arm.adapter.blocks) or 0
        self.task, dtype, patcher = task, jnp.dtype(settings.dtype), task and task.patcher
        self.module, self.plain = (c.build(dtype=dtype, patcher=patcher) for c in (config, model))
        self.moments = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
        if arm.policy is not None and arm.policy.method == "ppo":
            self.moments = keep_routers(self.moments, arm.policy.refresh)

    def lower(self, base: Any, train: Mix | Reviews, test: Mix | Reviews) -> None:
        """Traces everything; `compile` may then run in a thread of its own. The base may be given as shapes."""
        key, number = jax.random.key(0), jnp.zeros((), jnp.int32)
        rates = jnp.zeros(self.settings.steps_a_call, jnp.float32)
        self.carried = carried = jax.eval_shape(self._start, base, key)
        self.lowered = (
            jax.jit(self._start).lower(base, key),
            jax.jit(self._steps, donate_argnums=1).lower(base, carried, train, key, number, rates),
            jax.jit(self._score).lower(base, carried[0], test, key),
        )
        self.parameters = count_params(carried[0])[0]

    def compile(self) -> float:
        """Seconds that it took."""
        begun = time.perf_counter()
        self.start, self.steps, self.scores = (lowered.compile() for lowered in self.lowered)
        return time.perf_counter() - begun

    def _start(self, base: Any, key: Any) -> tuple[Any, Any]:
        """The trained part and its moments; what it shares with the base begins as the base has it."""
        ids = jnp.zeros((1, 2), jnp.int32)
        options = {} if self.task is None else {"entropies": jnp.zeros((1, 2), jnp.float32)}
        with given(jnp.zeros((1, 2, self.blocks))) if self.arm.labelled else nullcontext():
            drawn = nn.meta.unbox(self.module.init(key, ids, **options))["params"]
        own = split_params(drawn, self.arm.also_train)[1]
        trained = routers(drawn) if self.arm.over_oracle else _shared(own, base)
        return trained, self.moments.init(trained)

    def _options(self, base: Any, rows: Rows) -> dict[str, Any]:
        """What the model takes besides the parameters and the bytes."""
        options: dict[str, Any] = {} if rows.segment_ids is None else {"segment_ids": rows.segment_ids}
        if self.task is not None:
            options["entropies"] = find_entropies(self.task, base[FROZEN], _batch(rows))
        return options

    def _logits(self, base: Any, trained: Any, rows: Rows) -> tuple[Any, Any, Any]:
        """Of each target, with the code, if one router makes it, and the patches."""
        codes: list[Any] = []
        if self.arm.labelled:
            context = given(jax.nn.one_hot(rows.domain, self.blocks, dtype=jnp.float32))
        else:
            context = nullcontext() if self.arm.of_blocks else _recorded(codes)
        options = self._options(base, rows)
        with context:
            logits, patches = self.module.apply(  # pyright: ignore
                {"params": join_params(_own(base), trained)}, rows.inputs, **options
            )
        return logits, codes[0] if codes else None, patches

    def _loss(
        self, trained: Any, base: Any, mix: Mix | Reviews, rows: Rows, acting: Any, key: Any
    ) -> tuple[Any, Any]:
        """What is minimised, and the nats a byte."""
        if self.arm.policy is not None:
            return self._reinforced(trained, base, rows, acting, key)
        logits, code, _ = self._logits(base, trained, rows)
        nats, weights = _nats(logits, rows), _batch(rows).segment_ids.astype(jnp.float32)
        language = jnp.sum(nats * weights) / jnp.sum(weights)
        if isinstance(mix, Reviews):
            weights = mix.weights(rows)
        loss = jnp.sum(nats * weights) / jnp.sum(weights)
        if self.arm.divergence:
            loss = loss + self.arm.divergence * self._divergence(logits, base, rows)
        if self.arm.imitation:
            shares = code if self.blocks else group_shares(code, mix.domains)
            right = jnp.take_along_axis(shares, rows.domain[..., None], 2)
            loss = loss - self.arm.imitation * jnp.mean(jnp.log(jnp.maximum(right, LEAST)))
        return loss, language

    def _divergence(self, logits: Any, base: Any, rows: Rows) -> Any:
        """KL(base || model) a byte."""
        wanted = self.plain.apply({"params": _own(base)}, rows.inputs, **self._options(base, rows))[0]
        batch = _batch(rows)
        return divergence(logits, wanted, batch) / jnp.sum(batch.loss_mask).astype(jnp.float32)

    def _reinforced(self, trained: Any, base: Any, rows: Rows, acting: Any, key: Any) -> tuple[Any, Any]:
        """The policy's loss a byte, and the nats of the experts that it drew."""

        def run(params: Any, given: Any, **options: Any) -> tuple[Any, Any]:
            variables = {"params": join_params(_own(base), params), **given}
            (logits, _), side = self.module.apply(variables, rows.inputs, **options)
            return logits, side

        drawn = run(acting, {}, rngs={POLICY: key}, mutable=("intermediates", POLICY))[1]
        logits, side = run(trained, {POLICY: drawn[POLICY]}, mutable=("intermediates",))
        nats, without = (
            _nats(logits, rows),
            _nats(self.plain.apply({"params": _own(base)}, rows.inputs)[0], rows),
        )
        documents = jnp.ones(rows.inputs.shape, jnp.int32)
        assert self.arm.policy is not None
        loss, _ = surrogate(self.arm.policy, choices(side), choices(drawn), without - nats, documents)
        return loss / nats.size, jnp.mean(nats)

    def _steps(
        self, base: Any, carried: Any, mix: Mix | Reviews, key: Any, first: Any, rates: Any
    ) -> tuple[Any, Any]:
        """Several steps, each on rows that its number picks; and the bits per byte of these rows before the step."""
        settings = self.settings

        def step(carried: Any, now: Any) -> tuple[Any, Any]:
            (trained, moments), (number, rate) = carried, now
            own = jax.random.fold_in(key, number)
            drawn = mix.draw(own, settings.rows, settings.length, settings.spans)
            acting = acting_params(moments, trained, settings.policy.refresh)
            given = trained, base, mix, drawn, acting, jax.random.fold_in(own, 1)
            (_, nats), gradient = jax.value_and_grad(self._loss, has_aux=True)(*given)
            with jax.numpy_dtype_promotion("standard"):
                change, moments = self.moments.update(gradient, moments, trained)
                factors = _factors(trained, settings.router_factor)
                trained = jax.tree.map(lambda p, u, f: p - rate * f * u, trained, change, factors)
            return (trained, moments), nats / jnp.log(2.0)

        return jax.lax.scan(step, carried, (first + jnp.arange(settings.steps_a_call), rates))

    def _score(self, base: Any, trained: Any, mix: Mix | Reviews, key: Any) -> tuple[Any, Rows, Any]:
        """Nats of each target of the test rows, the rows, and what else `Scored` has."""
        settings, routed = self.settings, self.blocks > 0 and not (self.arm.labelled or self.arm.of_blocks)
        test = mix.draw(key, settings.test_rows, settings.length, settings.spans)
        batches = jax.tree.map(lambda x: x.reshape(-1, settings.rows, *x.shape[1:]), test)

        def score(rows: Rows) -> tuple[Any, Any]:
            logits, code, patches = self._logits(base, trained, rows)
            found = {"picked": count_picks(code, rows.domain, mix.domains)} if routed else {}
            if isinstance(mix, Reviews):
                found["right"] = mix.right(logits, rows)
            if patches is not None:
                found["cut"] = jnp.stack([jnp.sum(patches.lengths > 0), jnp.sum(patches.overflow)])
            return _nats(logits, rows), found

        nats, found = jax.lax.map(score, batches)
        sums = {name: jnp.sum(x, 0) for name, x in found.items() if name != "right"}
        rights = {"right": found["right"].reshape(-1)} if "right" in found else {}
        return nats.reshape(test.targets.shape), test, sums | rights

    def scored(self, base: Any, trained: Any, mix: Mix | Reviews) -> Scored:
        """On the rows of a fixed key."""
        nats, rows, found = jax.tree.map(np.asarray, self.scores(base, trained, mix, jax.random.key(0)))
        return Scored(nats.astype(np.float64), rows, **found)

    def train(self, base: Any, mix: Mix | Reviews, seed: int) -> tuple[Any, dict[str, Any]]:
        """The trained part after the settings' seconds or steps; steps, bytes a second, bits per byte on the way."""
        settings, (init, data) = self.settings, jax.random.split(jax.random.key(seed))
        carried = jax.block_until_ready(self.start(base, init))
        begun, curve, steps = time.perf_counter(), [], 0
        while (share := self._done(steps, time.perf_counter() - begun)) < 1:
            rates = np.full(settings.steps_a_call, self.arm.rate * scheduled(share), np.float32)
            carried, bits = self.steps(base, carried, mix, data, np.int32(steps), rates)
            curve.append(float(jnp.mean(bits)))
            steps += settings.steps_a_call
        seconds = time.perf_counter() - begun
        rate = steps * settings.rows * settings.length / seconds
        found = {"seconds": seconds, "steps": steps, "bytes_per_second": rate, "curve": curve}
        return carried[0], found

    def _done(self, steps: int, seconds: float) -> float:
        """Share of the training."""
        settings = self.settings
        return seconds / settings.seconds if settings.steps is None else steps / settings.steps


def group_shares(code: Any, groups: int) -> Any:
    """Shares of groups of neighbouring ranks: a softmax of the means of their numbers, [B, T, groups]."""
    return jax.nn.softmax(jnp.mean(code.reshape(*code.shape[:2], groups, -1), -1), -1)


def scheduled(share: float) -> float:
    """Of the peak rate, by the share of the training that is done: linear up, then a cosine to 0."""
    if share < WARM_UP:
        return (share + WARM_UP / 10) / (1.1 * WARM_UP)
    return 0.5 * (1 + float(np.cos(np.pi * (share - WARM_UP) / (1 - WARM_UP))))


def _recorded(codes: list[Any]) -> AbstractContextManager[Any]:
    """A context in which the code of every router is added to a list."""

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        found = call(*args, **options)
        if is_router(context):
            codes.append(found[0])
        return found

    return nn.intercept_methods(record)


def _batch(rows: Rows) -> Batch:
    """The rows, of which every byte is scored."""
    there = jnp.ones(rows.inputs.shape, jnp.int32) if rows.segment_ids is None else rows.segment_ids
    return Batch(rows.inputs, rows.targets, there, jnp.cumsum(jnp.ones_like(there), 1) - 1, there)


def _own(base: Any) -> Any:
    """The model's parameters of a base."""
    return {name: below for name, below in base.items() if name != FROZEN}


def _nats(logits: Any, rows: Rows) -> Any:
    """Of each target."""
    chosen = jnp.take_along_axis(logits, rows.targets[..., None], 2)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _shared(trained: Any, base: Any) -> Any:
    if not isinstance(trained, Mapping):
        return base
    return {name: _shared(below, base[name]) if name in base else below for name, below in trained.items()}


def _factors(trained: Any, router: float) -> Any:
    """Of the learning rate."""

    def factor(path: tuple[Any, ...], leaf: Any) -> float:
        return router if is_routers(path) else 1.0

    return jax.tree_util.tree_map_with_path(factor, trained)


def compile_all(
    programs: Mapping[str, Program],
    given: Mapping[str, tuple[Any, Mix | Reviews]],
    test: Mix | Reviews,
    report: Callable[[str], None],
) -> None:
    """Traces the programs one after another and compiles them side by side; "oracle" comes before arms over it.

    Args:
      programs: by arm.
      given: base and what is trained on, by arm.
      test: what is scored.
      report: prints a line.
    """
    from concurrent.futures import ThreadPoolExecutor

    begun = time.perf_counter()
    for name, program in programs.items():
        base, train = given[name]
        under = join_params(base, programs["oracle"].carried[0]) if program.arm.over_oracle else base
        program.lower(under, train, test)
    report(f"traced {len(programs)} programs in {time.perf_counter() - begun:.1f} s")
    with ThreadPoolExecutor(4) as pool:
        seconds = dict(zip(programs, pool.map(Program.compile, programs.values()), strict=True))
    taken = {name: round(value, 1) for name, value in seconds.items()}
    report(f"compiled in {time.perf_counter() - begun:.1f} s: {taken}")
