"""Slots of a state engine closed, opened with new routes, or emptied, by hand between steps or turns.

Shapes never change. Every function leaves the slots that it is not told of bit by bit as they were. Arrays may have
leading axes, such as the layers of a scanned stack. `StateEngineConfig.manager` closes slots while a run trains.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from jaxblt.array_checks import on_host
from jaxblt.mixers.slots.engine_state import ROUTE_SPREAD, StateEngineState
from jaxblt.mixers.slots.experimental.state_manager import CLOSED
from jaxblt.mixers.slots.state_edges import Engine
from jaxblt.mixers.slots.state_slots import Slots


def prune(params: dict[str, Any], dead: Bool[Array, "*L H S"]) -> dict[str, Any]:
    """Close slots: change a `StateEngine`'s parameters so that no token writes to dead slots or reads them.

    With an adaptive count a token may use only the first four slots of a head, so keep at least one of these open.

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
    """Return parameters in which closed slots are open again, with routes drawn as at the start of training.

    Args:
      params: parameters of a `StateEngine`.
      dead: mask of the closed slots to open.
      key: random key for the routes.

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
    """Empty the closed slots of a state.

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
