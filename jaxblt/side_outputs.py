"""Side outputs of modules: losses, metrics and next values of parameters, sown into two Flax collections.

Nothing is sown during `init`: otherwise its result would hold these collections, and a later call would add to them.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

SIDE_OUTPUTS = ("losses", "metrics")
"""The two collections into which modules may sow. Every `nn.scan` and `nn.remat` must declare both."""


@flax.struct.dataclass
class Sown:
    """A sown metric and its rank. Any axes in front are the layers of scans.

    Attributes:
      value: the metric in fp32.
      ndim: rank of the metric when it was sown, 0 or 1.
      is_next: True if the parameter of the same name takes this value from the next step on.
    """

    value: Float[Array, "*layers"]
    ndim: int = flax.struct.field(pytree_node=False)
    is_next: bool = flax.struct.field(pytree_node=False, default=False)

    def mean(self) -> Float[Array, "..."]:
        """Return the mean over layers."""
        return jnp.mean(self.value, axis=tuple(range(self.value.ndim - self.ndim)))


@flax.struct.dataclass
class Price:
    """A sown loss of each row, which training weighs by the probability of the row's targets.

    Attributes:
      rows: the losses in fp32; axes in front are the layers of scans.
    """

    rows: Float[Array, "*layers B"]


def sow_loss(module: nn.Module, name: str, value: Float[Array, ""]) -> None:
    """Add a loss, already multiplied by its weight, to the loss that training minimises."""
    if not module.is_initializing():
        module.sow("losses", name, value.astype(jnp.float32))


def sow_price(module: nn.Module, name: str, rows: Float[Array, "B"]) -> None:
    """Add a loss of each row, already multiplied by its weight; `sown_losses` weighs it by the row's probability."""
    if not module.is_initializing():
        module.sow("losses", name, Price(rows.astype(jnp.float32)))


def sow_metric(module: nn.Module, name: str, value: Any) -> None:
    """Report a scalar or a vector, with one number per slot, expert or head.

    Logs show the mean over layers and batches.

    Raises:
      ValueError: the metric has two axes or more.
    """
    _sow(module, name, value, is_next=False)


def sow_next(module: nn.Module, name: str, value: Any) -> None:
    """Report the value that the module's parameter `name` takes from the next step on, and log it.

    Such a parameter is read under `stop_gradient`. The value may lack axes of size 1 of the parameter.

    Raises:
      ValueError: the value has two axes or more.
    """
    _sow(module, name, value, is_next=True)


def next_params(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that modules sowed by `sow_next` in a pass, as a tree of parameters."""
    return _nexts(side.get("metrics", {}))


def with_next(params: Any, values: Any, good: Bool[Array, ""]) -> Any:
    """Return parameters with the values of `next_params` put in, if the step was good; otherwise unchanged."""
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
