"""Reports of modules beside their result: losses, counters and next values, sown into two collections.

`init` sows nothing: what it returns are parameters, and a call that is given a collection would add to it.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

SIDE_OUTPUTS = ("losses", "metrics")
"""The two collections into which modules may sow; every scan and remat declares both."""


@flax.struct.dataclass
class Sown:
    """A metric of known rank: axes in front of it are layers of a scan.

    Attributes:
      value: fp32.
      ndim: its rank where it was sown, 0 or 1.
      is_next: True if it is the value that a parameter of the same name has from the next step on.
    """

    value: Float[Array, "*layers"]
    ndim: int = flax.struct.field(pytree_node=False)
    is_next: bool = flax.struct.field(pytree_node=False, default=False)

    def mean(self) -> Float[Array, "..."]:
        """Return the mean over layers."""
        return jnp.mean(self.value, axis=tuple(range(self.value.ndim - self.ndim)))


@flax.struct.dataclass
class Price:
    """A loss of each row, which training weighs by how well the row is answered.

    Attributes:
      rows: fp32; axes in front are layers of a scan.
    """

    rows: Float[Array, "*layers B"]


def sow_loss(module: nn.Module, name: str, value: Float[Array, ""]) -> None:
    """Add a loss, its weight applied, to what training minimises."""
    if not module.is_initializing():
        module.sow("losses", name, value.astype(jnp.float32))


def sow_price(module: nn.Module, name: str, rows: Float[Array, "B"]) -> None:
    """Add a loss of each row, its weight applied, which a row pays by the probability of its targets: `sown_losses`."""
    if not module.is_initializing():
        module.sow("losses", name, Price(rows.astype(jnp.float32)))


def sow_metric(module: nn.Module, name: str, value: Any) -> None:
    """Report a scalar or a vector (one number a state, an expert, a head).

    Logs show its mean over layers and batches.

    Raises:
      ValueError: the metric has two axes or more.
    """
    _sow(module, name, value, is_next=False)


def sow_next(module: nn.Module, name: str, value: Any) -> None:
    """Report the value that the module's parameter `name` has from the next step on, and log it.

    The parameter is read under `stop_gradient`. Its value may lack axes of size 1 that the parameter has.

    Raises:
      ValueError: the value has two axes or more.
    """
    _sow(module, name, value, is_next=True)


def next_params(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that modules reported by `sow_next` in a pass, as a tree of parameters."""
    return _nexts(side.get("metrics", {}))


def with_next(params: Any, values: Any, good: Bool[Array, ""]) -> Any:
    """Return parameters with the values of `next_params` where the parameters have them, if the step was good."""
    if not isinstance(params, Mapping):
        return jnp.where(good, values.reshape(params.shape), params)
    return {
        name: with_next(below, values[name], good) if name in values else below
        for name, below in params.items()
    }


def _sow(module: nn.Module, name: str, value: Any, *, is_next: bool) -> None:
    value = jnp.asarray(value, jnp.float32)
    if value.ndim > 1:
        raise ValueError(
            f"metric {name!r} must be a scalar or a vector, got shape {value.shape}: reduce it first"
        )
    if not module.is_initializing():
        module.sow("metrics", name, Sown(value, value.ndim, is_next))


def _nexts(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, below in tree.items():
        if isinstance(below, Mapping):
            if kept := _nexts(below):
                found[name] = kept
        elif isinstance(below[0], Sown) and below[0].is_next:
            (sown,) = below
            found[name] = sown.value
    return found
