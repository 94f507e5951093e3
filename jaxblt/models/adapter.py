"""The interface of a stack to an adapter of its blocks; `jaxblt.adapters.AdapterConfig` is one."""

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

CHOSEN = "chosen"
"""The collection that may hold rows' codes in the place of a router's; see `jaxblt.adapters.update.row_adapters`."""


@runtime_checkable
class StackAdapter(Protocol):
    """A frozen dataclass that describes an adapter."""

    @property
    def of_blocks(self) -> bool:
        """True if each block has a router of its own, which reads the block's input."""
        ...

    def check(self, stack: Any) -> None:
        """Raise ValueError where the stack of this config cannot have the adapter."""
        ...

    def mixer(self, config: Any) -> Any:
        """Return a block's mixer config as the adapter asks for it."""
        ...

    def inside(
        self, path: tuple[str, ...], layer: int, code: Float[Array, "B T E"] | None, *, chosen: bool
    ) -> AbstractContextManager[Any]:
        """Return a context in which each site below a block's path adds its scaled update.

        `chosen` says that the collection "chosen" holds codes of rows.
        """
        ...

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> nn.Module | None:
        """Build the router `(x, *, segment_ids, state) -> (code, state)`, or return None."""
        ...

    def init_state(self, batch_size: int, dim: int) -> Any:
        """Return the router's state before the first token of rows of width `dim`, or None."""
        ...
