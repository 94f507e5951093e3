"""Training and scoring of models so small that a call of a single step would cost more than the step."""

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.benchmark.tasks.training_budget import CHUNK, Budget
from jaxblt.training.flops import count_params
from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig


class Rows(NamedTuple):
    """Ids, the ids to predict, and where they are scored."""

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    scored: Bool[Array, "B T"]


class Fitted(NamedTuple):
    """A trained model, and `figures`: parameters, steps, seconds, and its accuracy in each call before the update."""

    module: Any
    params: Any
    figures: dict[str, Any]


def fit(
    model: "ByteLMConfig",
    length: int,
    budget: Budget,
    key: Array,
    chunks: Iterable[Any],
    rows_of: Callable[[Any], Rows],
    *,
    enough: float = math.inf,
) -> Fitted:
    """Train on the cross-entropy of scored positions.

    Args:
      model: its config.
      length: positions of a row.
      budget: of training; the rate rises during its first tenth.
      key: of the parameters.
      chunks: for each call, what `rows_of` makes the rows of its steps from, with a leading axis of `CHUNK`.
      rows_of: traced.
      enough: a model that answers such a share of a chunk's questions, on rows it has not seen, is trained no further.
    """
    module = model.build(dtype=jnp.dtype(budget.dtype))
    boxed = jax.jit(module.init)(key, jnp.zeros((1, length), jnp.int32))
    rates = {"learning_rate": budget.learning_rate, "weight_decay": budget.weight_decay}
    adamw = AdamWConfig(**rates, warmup_steps=budget.steps // 10)
    optimizer = make_optimizer(adamw, budget.steps, boxed)
    params = nn.meta.unbox(boxed)

    def step(carried: Any, given: Any) -> tuple[Any, Any]:
        params, state = carried
        answers = lambda params: cross_entropy(module, params, rows_of(given))  # noqa: E731
        (_, accuracy), gradients = jax.value_and_grad(answers, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        with jax.numpy_dtype_promotion("standard"):
            params = jax.tree.map(lambda p, u: p + u, params, updates)
        return (params, state), accuracy

    carried, run, curve = (params, optimizer.init(params)), None, []
    begun = compiled = time.perf_counter()
    for chunk in chunks:
        if run is None:
            call = jax.jit(lambda carried, chunk: jax.lax.scan(step, carried, chunk), donate_argnums=0)
            run, compiled = call.lower(carried, chunk).compile(), time.perf_counter()
        carried, accuracies = run(carried, chunk)
        curve.append(float(jnp.mean(accuracies)))
        if curve[-1] >= enough:
            break
    figures = {
        "parameters": count_params(carried[0])[0],
        "steps": CHUNK * len(curve),
        "seconds": time.perf_counter() - compiled,
        "compile_seconds": compiled - begun,
        "accuracy_by_chunk": curve,
    }
    return Fitted(module, carried[0], figures)


def cross_entropy(module: Any, params: Any, rows: Rows) -> tuple[Array, Array]:
    """Return mean nats of the scored targets, and the share of them that is the likeliest id; parts may sow losses."""
    logits, _ = module.apply(params, rows.inputs)
    chosen = jnp.take_along_axis(logits, rows.targets[..., None], 2)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    asked = jnp.sum(rows.scored, dtype=jnp.float32)
    right = jnp.sum((jnp.argmax(logits, -1) == rows.targets) & rows.scored, dtype=jnp.float32)
    return jnp.sum(jnp.where(rows.scored, losses, 0)) / asked, right / asked


def share_right(module: Any, params: Any, rows: Rows) -> Array:
    """Return the share of the scored targets that is the likeliest id; traceable."""
    return cross_entropy(module, params, rows)[1]
