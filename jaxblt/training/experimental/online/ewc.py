"""Elastic weight consolidation (Kirkpatrick et al., 1612.00796): a price on moving parameters that matter."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

RowLoss = Callable[[Any, Int[Array, "B T"]], Float[Array, "B"]]
"""(parameters, rows of ids) -> nats of each row."""


@flax.struct.dataclass
class Anchor:
    """Parameters to stay near to, and how much each of them matters.

    Attributes:
      params: as they were.
      importance: the diagonal of the Fisher information, for each number.
    """

    params: Any
    importance: Any


def make_anchor(loss: RowLoss, params: Any, rows: Int[Array, "B T"]) -> Anchor:
    """Return an anchor at these parameters; a number matters by its mean square gradient over rows.

    Gradients are those of one row at a time. Those of a batch would cancel between rows.
    """

    def add(total: Any, row: Int[Array, "T"]) -> tuple[Any, None]:
        gradient = jax.grad(lambda params: loss(params, row[None])[0])(params)
        return jax.tree.map(lambda t, g: t + g * g, total, gradient), None

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
    total, _ = jax.lax.scan(add, zeros, rows)
    return Anchor(params, jax.tree.map(lambda t: t / len(rows), total))


def ewc_penalty(anchor: Anchor, params: Any) -> Float[Array, ""]:
    """Return half the sum of importance (p - p_0)^2."""
    parts = jax.tree.map(lambda p, a, f: jnp.sum(f * (p - a) ** 2), params, anchor.params, anchor.importance)
    return jnp.float32(0.5) * sum(jax.tree.leaves(parts), jnp.float32(0))
