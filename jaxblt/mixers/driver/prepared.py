"""Arrays that only parameters decide, made once for all calls with a state instead of in each."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

COLLECTION = "prepared"


def made_once(module: nn.Module, name: str, make: Callable[[], Float[Array, "..."]]) -> Float[Array, "..."]:
    """Return `make()`, or the value that the collection "prepared" holds for it.

    Call it in calls with a state only, for what no token enters. `make` reads parameters, so training goes without.

    Args:
      module: whose parameters `make` reads.
      name: of the array within the module.
      make: the array.
    """
    if module.has_variable(COLLECTION, name):
        return module.get_variable(COLLECTION, name)
    made = make()
    if module.is_mutable_collection(COLLECTION) and not module.is_initializing():
        module.put_variable(COLLECTION, name, made)
    return made


def prepares(config: Any) -> bool:
    """Return whether a config holds, at any depth, one with `prepares = True`.

    The mixer of such a config calls `made_once`.
    """
    if isinstance(config, Mapping):
        return any(map(prepares, config.values()))
    if isinstance(config, tuple):
        return any(map(prepares, config))
    if not dataclasses.is_dataclass(config):
        return False
    parts = (getattr(config, field.name) for field in dataclasses.fields(config))
    return getattr(config, "prepares", False) or any(map(prepares, parts))


def prepare(apply: Callable[..., Any], variables: Any, *args: Any, **arrays: Any) -> Any:
    """Return the variables with all that `made_once` makes of them.

    `apply(variables, *args, **arrays)` is a call with a state. Later calls with a state of the same capacity are given
    the result in place of `variables`, until these change. Tokens play no part: the compiler drops whatever else the
    call computes. Modules that prepare nothing add nothing.

    Args:
      apply: of a mixer, a stack or a model; with its method, if that is not `__call__`.
      variables: {"params": ...}.
      args: of one call; any tokens will do.
      arrays: of the same call, by name; the state is one of them or of `args`.
    """

    @jax.jit
    def made(variables: Any, args: Any, arrays: Any) -> Any:
        return apply(variables, *args, mutable=[COLLECTION], **arrays)[1]

    return {**variables, **made(variables, args, arrays)}
