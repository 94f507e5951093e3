"""Sites of one stack whose codes come at different levels: a router for each level, one beside the other."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.adapters.code.levels import Level
from jaxblt.adapters.code.router import Router


def level_name(level: Level | Mixed) -> str:
    """Return the name of a level's router among several."""
    return "mixed" if isinstance(level, Mixed) else level


class Routers(nn.Module):
    """The codes of several routers behind each other: [B, T, D] -> [B, T, L E]; no router reads another's.

    Attributes:
      adapters: name and `AdapterConfig` of each.
    """

    adapters: tuple[tuple[str, Any], ...]

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: dict[str, Any] | None = None,
        side: Float[Array, "B T S"] | None = None,
    ) -> tuple[Float[Array, "B T W"], dict[str, Any] | None]:
        """Return codes and states as a `Router` does; the states by name."""
        codes, after = [], {}
        for name, adapter in self.adapters:
            given = None if state is None else state[name]
            code, after[name] = Router(adapter, name=name)(x, segment_ids=segment_ids, state=given, side=side)
            codes.append(code)
        return jnp.concatenate(codes, -1), None if state is None else after
