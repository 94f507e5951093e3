"""Training of all seeds of a model side by side on recall over a gap, in one program a stage, and their tests."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.benchmark.memory.gap_settings import STEPS_A_CALL, Settings

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig


@dataclass(frozen=True)
class Programs:
    """The compiled programs of a model, shared by all that are trained side by side.

    Attributes:
      shapes: of one model's parameters.
      start: (keys, held) -> parameters, and the optimiser's state.
      stages: by stage of training, (carried, held, keys, first step) -> (carried, accuracy of each model and step).
      score: (parameters, gaps [B], keys) -> mean nats of an answer and right answers, of each model.
      rows: that `score` takes at once.
      parameters: of one model.
      seconds: that compiling took.
    """

    shapes: Any
    start: Callable[..., Any]
    stages: tuple[Callable[..., Any], ...]
    score: Callable[..., Any]
    rows: int
    parameters: int
    seconds: float


def compile_model(model: "ByteLMConfig", settings: Settings, count: int) -> Programs:
    """Compile the stages of training of `count` models, and their test on rows with room for the longest gap."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.memory.gap_rows import draw_gaps, draw_rows
    from jaxblt.training.flops import count_params
    from jaxblt.training.metrics import sown_losses
    from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer

    begun, task = time.perf_counter(), settings.task
    module = model.build(dtype=jnp.dtype(settings.dtype))
    init = lambda key: {"params": module.init(key, jnp.zeros((1, 2 * settings.chunk), jnp.int32))["params"]}  # noqa: E731
    boxed = jax.eval_shape(init, jax.random.key(0))
    adamw = AdamWConfig(learning_rate=settings.learning_rate, warmup_steps=settings.steps // 10)
    optimizer = make_optimizer(adamw, settings.steps, boxed)

    def start(key: Any, held: Any) -> Any:
        params = jax.tree.map(jnp.multiply, nn.meta.unbox(init(key)), held)
        return params, optimizer.init(params)

    def loss(params: Any, batch: Any, sown: tuple[str, ...] = ()) -> tuple[Any, Any]:
        (logits, _), side = module.apply(params, batch.inputs, mutable=sown)
        chosen = jnp.take_along_axis(logits, batch.targets[..., None], 2)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        right = (jnp.argmax(logits, -1) == batch.targets) & batch.scored
        asked = batch.inputs.shape[0] * task.pairs
        return jnp.sum(jnp.where(batch.scored, losses, 0)) / asked + sown_losses(side), jnp.sum(right)

    learning = partial(loss, sown=("losses",) if settings.predictor else ())

    def stage(multiple: int) -> Any:
        length = settings.length(multiple)
        batch_rows = max(settings.tokens // length, 1)

        def step(held: Any, key: Any, carried: Any, number: Any) -> tuple[Any, Any]:
            params, state = carried
            drawn, gaps = jax.random.split(jax.random.fold_in(key, number))
            gaps = draw_gaps(gaps, batch_rows, settings.least_gap, multiple * settings.reach)
            batch = draw_rows(task, drawn, gaps, length)
            (_, right), gradients = jax.value_and_grad(learning, has_aux=True)(params, batch)
            gradients = jax.tree.map(jnp.multiply, gradients, held)
            updates, state = optimizer.update(gradients, state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = jax.tree.map(lambda p, u: p + u, params, updates)
            return (params, state), right / (batch_rows * task.pairs)

        def steps(carried: Any, held: Any, key: Any, first: Any) -> Any:
            numbers = first + jnp.arange(STEPS_A_CALL)
            return jax.lax.scan(lambda c, n: step(held, key, c, n), carried, numbers)

        together = jax.jit(jax.vmap(steps, in_axes=(0, 0, 0, None)), donate_argnums=0)
        return together.lower(*given, keys, jax.ShapeDtypeStruct((), jnp.int32)).compile()

    def score(params: Any, gaps: Any, key: Any) -> Any:
        return loss(params, draw_rows(task, key, gaps, longest))

    params = nn.meta.unbox(boxed)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), params)
    begin = jax.jit(jax.vmap(start))
    given = (jax.eval_shape(begin, keys, stacked), stacked)
    longest = settings.length(max(settings.tested))
    rows = min(max(2 * settings.tokens // longest, 1), settings.test_rows)
    gaps = jax.ShapeDtypeStruct((rows,), jnp.int32)
    scored = jax.jit(jax.vmap(score, in_axes=(0, None, 0))).lower(stacked, gaps, keys).compile()
    stages = tuple(stage(multiple) for multiple in settings.trained)
    counted = count_params(params)[0]
    return Programs(params, begin, stages, scored, rows, counted, time.perf_counter() - begun)


def train(
    name: str,
    programs: Programs,
    settings: Settings,
    kinds: Sequence[tuple[bool, int]],
    time_limit_s: float | None,
) -> list[dict[str, Any]]:
    """Train (without reads or not, seed) side by side, and return the accuracy at each gap and on the way.

    Seconds and tokens are of all together. Stages that the limit left no time for have none.
    """
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.memory.gap_models import held

    keys = jnp.stack([jax.random.split(jax.random.key(seed), 3) for _, seed in kinds])
    init, data, test = keys[:, 0], keys[:, 1], keys[:, 2]
    masks = [held(name, programs.shapes, off=off) for off, _ in kinds]
    mask = jax.tree.map(lambda *leaves: jnp.stack(leaves), *masks)
    carried, curve = programs.start(init, mask), []
    count = len(settings.trained)
    each, seconds, done = settings.steps // count, [0.0] * count, [0] * count
    for first in range(0, settings.steps, STEPS_A_CALL):
        if time_limit_s is not None and sum(seconds) > time_limit_s:
            break
        begun, place = time.perf_counter(), first // each
        program = programs.stages[place]
        carried, accuracies = program(carried, mask, data, jnp.asarray(first, jnp.int32))
        curve.append(np.mean(np.asarray(accuracies), axis=1))
        seconds[place] += time.perf_counter() - begun
        done[place] += STEPS_A_CALL
    lengths = [settings.length(multiple) for multiple in settings.trained]
    tokens = [n * max(settings.tokens // length, 1) * length for n, length in zip(done, lengths, strict=True)]
    gaps = [test_gap(programs, settings, carried[0], multiple, test) for multiple in settings.tested]
    shared = {
        "parameters": programs.parameters,
        "side_by_side": len(kinds),
        "steps": sum(done),
        "seconds": seconds,
        "tokens_per_second": [
            len(kinds) * count / taken if taken else None
            for count, taken in zip(tokens, seconds, strict=True)
        ],
        "compile_seconds": programs.seconds,
    }
    return [
        {
            "seed": seed,
            **shared,
            "gaps": [gap[place] for gap in gaps],
            "accuracy_by_call": [round(float(accuracies[place]), 4) for accuracies in curve],
        }
        for place, (_, seed) in enumerate(kinds)
    ]


def test_gap(
    programs: Programs, settings: Settings, params: Any, multiple: int, keys: Any
) -> list[dict[str, Any]]:
    """Return accuracy of each model at one gap, with the Wilson interval of its answers, and bits of an answer."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.intervals import wilson

    batches = -(-settings.test_rows // programs.rows)
    gaps = jnp.full((programs.rows,), multiple * settings.reach, jnp.int32)
    split = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, multiple), batches))(keys)
    scores = [jax.device_get(programs.score(params, gaps, split[:, batch])) for batch in range(batches)]
    nats, right = (np.sum(column, axis=0) for column in zip(*scores, strict=True))
    asked = batches * programs.rows * settings.pairs
    found = []
    for bits, count in zip((nats / batches / math.log(2)).tolist(), right.tolist(), strict=True):
        low, high = wilson(count, asked)
        told = {"accuracy": count / asked, "low": low, "high": high, "right": count, "asked": asked}
        found.append({"multiple": multiple, "gap": multiple * settings.reach, "bits": bits, **told})
    return found
