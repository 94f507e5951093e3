"""Feature-wise scales and shifts within bounds, which follow the code."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.update.forms import Form, Own, Param
from jaxblt.validation import check_bounds, check_fields

HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Film(Form):
    """Residual FiLM (Perez et al., 1709.07871): y + g tanh(c S) y + b tanh(c Z), with S and Z [E, N] from 0.

    So the factor of y lies within 1 - g and 1 + g, and what is added within -b and b, whatever the code.

    Attributes:
      factor: g.
      shift: b; 0 for no shift. A product without a bias has nowhere to merge one.
    """

    name: ClassVar[str] = "film"
    factor: float = 0.2
    shift: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "factor", above=0, most=1)
        check_bounds(self, "shift", least=0)

    def params(self, inputs: int, outputs: int, numbers: int) -> dict[str, Param]:
        """Return S, and Z where there is a shift."""
        each = Param((numbers, outputs), nn.initializers.zeros)
        return {"scale": each} | ({"shift": each} if self.shift else {})

    def change(
        self,
        own: Own,
        x: Float[Array, "B T K"],
        y: Float[Array, "B T N"],
        code: Float[Array, "#B #T E"],
    ) -> Float[Array, "B T N"]:
        """Return y, scaled and shifted."""
        y = y * self._factor(code, own)
        return y + self._added(code, own) if self.shift else y

    def at_code(self, own: Own, code: Float[Array, "E"]) -> dict[str, Float[Array, "..."]]:
        """Return c S and c Z, each in a row of its own."""
        return {name: jnp.matmul(code, matrix, precision=HIGHEST)[None] for name, matrix in own.items()}

    def merge(
        self, own: Own, kernel: Float[Array, "K N"], shift: Float[Array, "N"] | None
    ) -> tuple[Float[Array, "K N"], Float[Array, "N"] | None]:
        """Return the scaled kernel, and the shift."""
        one = jnp.ones((1,), jnp.float32)
        factor = self._factor(one, own)
        shift = None if shift is None else shift * factor
        if self.shift:
            shift = self._added(one, own) + (0 if shift is None else shift)
        return kernel * factor[None], shift

    def _factor(self, code: Float[Array, "*T E"], own: Own) -> Float[Array, "*T N"]:
        return 1 + jnp.float32(self.factor) * jnp.tanh(jnp.matmul(code, own["scale"], precision=HIGHEST))

    def _added(self, code: Float[Array, "*T E"], own: Own) -> Float[Array, "*T N"]:
        return jnp.float32(self.shift) * jnp.tanh(jnp.matmul(code, own["shift"], precision=HIGHEST))
