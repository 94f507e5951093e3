"""Diagonal updates of square products; beside a low-rank update they make low rank plus diagonal."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.update.forms import Form, Own, Param

HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Diagonal(Form):
    """y + (c D) * x of a product with as many outputs as inputs, with D [E, N] from 0."""

    name: ClassVar[str] = "diagonal"

    def check(self, site: str, inputs: int, outputs: int, numbers: int) -> None:
        """Raise ValueError unless the product is square."""
        if inputs != outputs:
            raise ValueError(
                f"Diagonal() at site {site!r}, which has {inputs} inputs and {outputs} outputs: name square products"
            )

    def params(self, inputs: int, outputs: int, numbers: int) -> dict[str, Param]:
        """Return D."""
        return {"scale": Param((numbers, outputs), nn.initializers.zeros)}

    def change(
        self,
        own: Own,
        x: Float[Array, "B T K"],
        y: Float[Array, "B T N"],
        code: Float[Array, "#B #T E"],
    ) -> Float[Array, "B T N"]:
        """Return y and the update."""
        return y + jnp.matmul(code, own["scale"], precision=HIGHEST) * x.astype(jnp.float32)

    def at_code(self, own: Own, code: Float[Array, "E"]) -> dict[str, Float[Array, "..."]]:
        """Return c D, in a row of its own."""
        return {"scale": jnp.matmul(code, own["scale"], precision=HIGHEST)[None]}

    def merge(
        self, own: Own, kernel: Float[Array, "K N"], shift: Float[Array, "N"] | None
    ) -> tuple[Float[Array, "K N"], Float[Array, "N"] | None]:
        """Return the kernel and its diagonal."""
        return kernel + jnp.diag(own["scale"][0]), shift
