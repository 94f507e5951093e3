"""The scale of the loss in fp16, whose gradients would otherwise vanish or overflow."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxblt.validation import check_bounds, check_fields


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """The dynamic scale of the loss (Micikevicius et al., 1710.03740, sec. 3.2).

    Attributes:
      first: the scale of step 0.
      every: good steps in a row after which the scale doubles.
    """

    first: float = 2.0**15
    every: int = 2000

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "first", least=1, most=2.0**24)
        check_bounds(self, "every", least=1)


def first_loss_scale(config: LossScaleConfig) -> dict[str, Array]:
    """Return the state before step 0: the scale, and good steps since it last changed."""
    return {"scale": jnp.float32(config.first), "good": jnp.int32(0)}


def next_loss_scale(state: dict[str, Array], good: Bool[Array, ""], every: int) -> dict[str, Any]:
    """Return the scale after a step: half after one that was not finite, twice after `every` good ones, within 2^24.

    It is never below 1.
    """
    count = state["good"] + 1
    grown = jnp.where(count >= every, jnp.minimum(2 * state["scale"], 2.0**24), state["scale"])
    scale: Float[Array, ""] = jnp.where(good, grown, jnp.maximum(state["scale"] / 2, 1.0))
    return {"scale": scale, "good": jnp.where(good & (count < every), count, 0)}
