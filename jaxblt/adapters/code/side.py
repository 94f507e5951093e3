"""A read: features of each token that the caller knows and the text does not hold."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.code.levels import Level
from jaxblt.adapters.code.reads import Features, Read, RouterInput
from jaxblt.mixers.driver.base import blank
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class Side(Read):
    """Side features of each token, which `Stack` and `Router` take as `side`; known before their token.

    A chunk reads those of its first token, zero if that is a hole.

    Attributes:
      features: how many a token has.
    """

    features: int
    name: ClassVar[str] = "side"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "features", least=1)

    @property
    def side(self) -> int:
        """Side features a token that it takes of the call: all of its own."""
        return self.features

    def zero(self, config: Any, batch_size: int, dim: int) -> Float[Array, "B S"]:
        """Return the features that the open chunk began with: none."""
        return jnp.zeros((batch_size, self.features), jnp.float32)

    def width(self, config: Any, dim: int, level: Level) -> int:
        """Return the number of side features, 0 for a prefix."""
        return 0 if level == "prefix" else self.features

    def hear(self, router: nn.Module, call: RouterInput, state: Any) -> tuple[Features, Any]:
        """Return the features of each token, and of the first token of its chunk."""
        token = blank(call.beside["side"].astype(jnp.float32), call.content)
        chunk, after = call.hold_from_chunk_start(token, state)
        return {"chunk": chunk, "token": token}, after
