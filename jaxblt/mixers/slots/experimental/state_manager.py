"""Housekeeping of a state engine's slots between training steps: which are hardly read, pruned, or begun anew.

Shapes never change. Every function leaves the slots that it is not told of bit by bit as they were. Arrays may have
leading axes, such as the layers of a scanned stack.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxblt.array_checks import on_host
from jaxblt.mixers.slots.state_edges import Engine
from jaxblt.mixers.slots.state_engine import ROUTE_SPREAD, StateEngineState
from jaxblt.mixers.slots.state_slots import Slots
from jaxblt.validation import check_bounds, check_fields

CLOSED = -1e4
"""Bias of a pruned slot: its softmax is exactly 0, and so is the gradient that would open it again."""


@dataclasses.dataclass(frozen=True)
class StateManager:
    """Importance of slots, an exponential mean of S times the share of reads that a slot gets: 1 is a fair share.

    Attributes:
      decay: of the mean, a step.
      threshold: slots of less importance are dead.
    """

    decay: float = 0.9
    threshold: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "decay", least=0, below=1)
        check_bounds(self, "threshold", least=0, below=1, why=": 1 is the mean over slots")

    def update(
        self, importance: Float[Array, "*L H S"] | None, read_mass: Float[Array, "*L H S"]
    ) -> Float[Array, "*L H S"]:
        """Return the importance after a step.

        It stays where the read mass is not finite, as of a step that is skipped.

        Args:
          importance: before it; None at the first step.
          read_mass: share of reads of each slot, which sums to 1 over slots: the metric "state_read_mass" of a layer,
            reshaped to [H, S]. A layer sows it flat.

        Raises:
          ValueError: the read mass has no axes of heads and slots, or another shape than the importance.
        """
        if read_mass.ndim < 2 or (importance is not None and importance.shape != read_mass.shape):
            expected = "[..., heads, slots]" if importance is None else importance.shape
            raise ValueError(
                f"read_mass must have shape {expected}, got {read_mass.shape}: reshape the metric to [heads, slots]"
            )
        now = read_mass.shape[-1] * read_mass
        before = jnp.ones_like(now) if importance is None else importance
        after = now if importance is None else self.decay * importance + (1 - self.decay) * now
        return jnp.where(jnp.isfinite(now), after, before)

    def dead(self, importance: Float[Array, "*L H S"]) -> Bool[Array, "*L H S"]:
        """Return slots below the threshold.

        The most important slot of a head is never among them, as importances average 1.
        """
        return importance < self.threshold


def prune(params: dict[str, Any], dead: Bool[Array, "*L H S"]) -> dict[str, Any]:
    """Change a `StateEngine`'s parameters so that no token writes to dead slots or reads them.

    With an adaptive count tokens may be left with a head's first four slots: keep one of those open.

    Raises:
      ValueError: the parameters are of another mixer, `dead` is no mask of their slots, or has all slots of a head.
    """
    _check_dead(dead, _route_of(params)["bias"].shape)
    values = on_host(dead)
    if values is not None and values.all(-1).any():
        raise ValueError("dead has all slots of a head: leave one open, as `StateManager.dead` does")
    route = params["route"]
    closed = route | {"bias": jnp.where(dead, CLOSED, route["bias"])}
    return params | {"route": closed, "read_bias": jnp.where(dead, CLOSED, params["read_bias"])}


def begin_anew(params: dict[str, Any], dead: Bool[Array, "*L H S"], key: PRNGKeyArray) -> dict[str, Any]:
    """Return parameters with open dead slots, their routes drawn as at the start of training.

    Args:
      params: of a `StateEngine`.
      dead: slots.
      key: of the routes.

    Raises:
      ValueError: the parameters are of another mixer, or `dead` is no mask of their slots.
    """
    _check_dead(dead, _route_of(params)["bias"].shape)
    kernel = params["route"]["kernel"]
    drawn = jax.random.normal(key, kernel.shape, kernel.dtype) * ROUTE_SPREAD * kernel.shape[-3] ** -0.5
    route = {
        "kernel": jnp.where(dead[..., None, :, :], drawn, kernel),
        "bias": jnp.where(dead, 0.0, params["route"]["bias"]),
    }
    return params | {"route": route, "read_bias": jnp.where(dead, 0.0, params["read_bias"])}


def clear(state: StateEngineState, dead: Bool[Array, "*L H S"]) -> StateEngineState:
    """Empty the dead slots of a state.

    Raises:
      ValueError: the state is of another mixer, or `dead` is no mask of its slots.
    """
    if not isinstance(state, StateEngineState):
        raise ValueError(f"expected the state of a StateEngine, got a {type(state).__name__}")
    engine, keys = state.engine, state.slots.keys.shape
    _check_dead(dead, (*keys[:-4], keys[-3], keys[-1]))
    if isinstance(engine, Slots):
        return dataclasses.replace(state, engine=_cleared(engine, dead))
    gone = dead[..., None, :, :, None]
    edge, cell = jax.tree.map(lambda x: jnp.where(gone, 0.0, x), (engine.edge, engine.cell))
    engine = Engine(_cleared(engine.slots, dead), edge, cell, engine.time)
    return dataclasses.replace(state, engine=engine)


def _route_of(params: dict[str, Any]) -> dict[str, Any]:
    if not {"route", "read_bias"} <= set(params):
        raise ValueError(
            f"expected the parameters of one StateEngine, got those of {', '.join(sorted(params))}: name the mixer's"
        )
    return params["route"]


def _check_dead(dead: Bool[Array, "*L H S"], shape: tuple[int, ...]) -> None:
    """Refuse an importance in place of a mask: all of its slots would count as dead."""
    kind = str(getattr(dead, "dtype", type(dead).__name__))
    if kind != "bool" or dead.shape != shape:
        raise ValueError(
            f"dead must be a mask of bool {shape}, heads and slots last, got {kind} {np.shape(dead)}: "
            "`StateManager.dead` makes one"
        )


def _cleared(slots: Slots, dead: Bool[Array, "*L H S"]) -> Slots:
    keys = jnp.where(dead[..., None, :, None, :], 0.0, slots.keys)
    return Slots(keys, jnp.where(dead[..., None, :, :, None], 0.0, slots.values))
