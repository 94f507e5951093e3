"""The routers that act: those that draw experts for PPO, a few updates older than the ones that learn."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Int

from jaxblt.adapters import join_params
from jaxblt.adapters.code.router import ROUTER


class Acting(NamedTuple):
    """State of an optimiser that keeps older routers.

    Attributes:
      inner: of the optimiser itself.
      updates: so far.
      routers: as they were at the start of the phase that the last update was of; parameters of the first phase before.
    """

    inner: Any
    updates: Int[Array, ""]
    routers: Any


def keep_routers(optimizer: optax.GradientTransformation, refresh: int) -> optax.GradientTransformation:
    """Let the optimiser keep a copy of the routers: that from before updates 0, `refresh`, 2 `refresh`, ...

    The copy is part of the optimiser's state, so that it is stored with it and a step that is skipped changes neither.
    """

    def init(params: Any) -> Acting:
        copied = jax.tree.map(jnp.copy, _routers(params))
        return Acting(optimizer.init(params), jnp.zeros((), jnp.int32), copied)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Acting]:
        routers = _current(state, params, refresh)
        updates, inner = optimizer.update(updates, state.inner, params)
        return updates, Acting(inner, state.updates + 1, routers)

    return optax.GradientTransformation(init, update)


def acting_params(state: Any, params: Any, refresh: int) -> Any:
    """Return the parameters with the routers that draw in this step; without a kept copy all as they are."""
    if not isinstance(state, Acting):
        return params
    return join_params(params, _current(state, params, refresh))


def _current(state: Acting, params: Any, refresh: int) -> Any:
    """Return the copy, or the parameters themselves at the start of a phase."""
    begins = state.updates % refresh == 0
    return jax.tree.map(lambda old, new: jnp.where(begins, new, old), state.routers, _routers(params))


def _routers(params: Any) -> Any:
    """Return what lies below a router, in a tree that may hold routers alone."""
    return unflatten_dict({path: leaf for path, leaf in flatten_dict(params).items() if ROUTER in path})
