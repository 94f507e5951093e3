"""Weights of several tasks that follow how their losses and gradients go: GradNorm and dynamic weight averaging.

The weights w lie in the parameters of `TaskHeads`, so that checkpoints hold them. They are no parameters of the loss:
`balanced` takes their gradients, which are the tasks' losses L_i since loss = Σ w_i L_i, and moves them by a rule. The
optimiser sees zeros in their place. A step that is skipped moves nothing.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxblt.models.labeller import HEAD
from jaxblt.models.task_heads import PROBES, TASK_WEIGHTS

Balance = Literal["gradnorm", "dwa"]

ALPHA = 1.5
"""GradNorm's exponent: how strongly a task that learns slowly is helped (Chen et al. 2018, sec. 3.2)."""
RATE = 0.025
"""Learning rate of GradNorm's weights."""
LEAST = 0.01
"""The least weight of a task by GradNorm, before weights are scaled to sum to the number of tasks."""
TEMPERATURE = 2.0
"""Of dynamic weight averaging: weights are evener the higher it is (Liu et al. 2019, sec. 3.2)."""
WINDOW = 50
"""Steps whose mean loss dynamic weight averaging compares with that of the steps before."""


class Balancing(NamedTuple):
    """The state of the weights beside the optimiser's.

    Attributes:
      inner: of the optimiser.
      reference: L_i(0) of GradNorm, or the mean loss of the last whole window; 0 before it is known.
      sums, counts: of losses in the window that runs, and of batches that had a label.
      steps: updates so far.
    """

    inner: Any
    reference: Float[Array, "N"]
    sums: Float[Array, "N"]
    counts: Float[Array, "N"]
    steps: Int[Array, ""]


def balanced(inner: optax.GradientTransformation, balance: Balance) -> optax.GradientTransformation:
    """Let an optimiser train all parameters except the tasks' weights, which follow a rule."""

    def init(params: Any) -> Balancing:
        zeros = jnp.zeros_like(params[HEAD][TASK_WEIGHTS])
        return Balancing(inner.init(params), zeros, zeros, zeros, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Balancing]:
        head, old = updates[HEAD], params[HEAD][TASK_WEIGHTS]
        own = {name: jnp.zeros_like(head[name]) for name in (TASK_WEIGHTS, PROBES) if name in head}
        moved: Any
        moved, kept = inner.update({**updates, HEAD: {**head, **own}}, state.inner, params)
        state = state._replace(inner=kept, steps=state.steps + 1)
        if balance == "gradnorm":
            new, state = _by_gradients(old, head[TASK_WEIGHTS], head[PROBES], state)
        else:
            new, state = _by_losses(old, head[TASK_WEIGHTS], state)
        return {**moved, HEAD: {**moved[HEAD], **own, TASK_WEIGHTS: new - old}}, state

    return optax.GradientTransformation(init, update)


def _by_gradients(
    weights: Float[Array, "N"], losses: Float[Array, "N"], probes: Float[Array, "N D"], state: Balancing
) -> tuple[Float[Array, "N"], Balancing]:
    """Take a step of GradNorm (Chen et al. 2018, 1711.02257, algorithm 1).

    G_i is the norm of w_i ∂L_i/∂e, e the scales of the channels that all heads read. With l_i = L_i / L_i(0) and
    r_i = l_i / mean(l), the rule lowers Σ |G_i - mean(G) r_i^α|, the target kept constant, by its gradient
    sign(G_i - mean(G) r_i^α) G_i / w_i. Weights then sum to the number of tasks. A batch without a label of some task
    moves no weight.
    """
    has_all = jnp.all(losses > 0)
    first = jnp.where((state.reference > 0) | ~has_all, state.reference, losses)
    norms = jnp.sqrt(jnp.sum(probes.astype(jnp.float32) ** 2, 1))
    relative = losses / jnp.maximum(first, 1e-12)
    target = jnp.mean(norms) * (relative / jnp.maximum(jnp.mean(relative), 1e-12)) ** jnp.float32(ALPHA)
    slope = jnp.sign(norms - target) * norms / weights
    moved = jnp.maximum(weights - jnp.float32(RATE) * slope, jnp.float32(LEAST))
    moved = moved * (len(weights) / jnp.sum(moved))
    return jnp.where(has_all, moved, weights), state._replace(reference=first)


def _by_losses(
    weights: Float[Array, "N"], losses: Float[Array, "N"], state: Balancing
) -> tuple[Float[Array, "N"], Balancing]:
    """Take a step of dynamic weight averaging (Liu et al. 2019, 1803.10704, eq. 7).

    Behind each window, w_i = N exp(r_i / T) / Σ_j exp(r_j / T) with r_i = L_i(this window) / L_i(the one before). They
    stay 1 until two windows are whole. A task without a label in a window keeps its mean loss.
    """
    sums, counts = state.sums + losses, state.counts + (losses > 0).astype(jnp.float32)
    ends = state.steps % WINDOW == 0
    mean = jnp.where(counts > 0, sums / jnp.maximum(counts, 1), state.reference)
    ratio = mean / jnp.maximum(state.reference, 1e-12)
    share = jax.nn.softmax(ratio / jnp.float32(TEMPERATURE)) * len(weights)
    is_known = jnp.all((state.reference > 0) & (mean > 0))
    state = state._replace(
        reference=jnp.where(ends, mean, state.reference),
        sums=jnp.where(ends, 0, sums),
        counts=jnp.where(ends, 0, counts),
    )
    return jnp.where(ends & is_known, share, weights), state
