"""Reports of modules beside their result: losses and counters, sown into two collections.

`init` sows nothing: what it returns are parameters, and a call that is given a collection would add to it.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

SIDE_OUTPUTS = ("losses", "metrics")
"""The two collections into which modules may sow; every scan and remat declares both."""


@flax.struct.dataclass
class Sown:
    """A metric of known rank: axes in front of it are layers of a scan.

    Attributes:
      value: fp32.
      ndim: its rank where it was sown, 0 or 1.
    """

    value: Float[Array, "*layers"]
    ndim: int = flax.struct.field(pytree_node=False)

    def mean(self) -> Float[Array, "..."]:
        """Return the mean over layers."""
        return jnp.mean(self.value, axis=tuple(range(self.value.ndim - self.ndim)))


def sow_loss(module: nn.Module, name: str, value: Float[Array, ""]) -> None:
    """Add a loss, its weight applied, to what training minimises."""
    if not module.is_initializing():
        module.sow("losses", name, value.astype(jnp.float32))


def sow_metric(module: nn.Module, name: str, value: Any) -> None:
    """Report a scalar or a vector (one number a state, an expert, a head).

    Logs show its mean over layers and batches.

    Raises:
      ValueError: the metric has two axes or more.
    """
    value = jnp.asarray(value, jnp.float32)
    if value.ndim > 1:
        raise ValueError(
            f"metric {name!r} must be a scalar or a vector, got shape {value.shape}: reduce it first"
        )
    if not module.is_initializing():
        module.sow("metrics", name, Sown(value, value.ndim))
