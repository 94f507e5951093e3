"""Updates that are sums of Kronecker products: few parameters, and of full rank."""

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
class Kronecker(Form):
    """y + sum_e c_e x (V_e ⊗ U_e), with V_e [k, n] drawn and U_e [K/k, N/n] from 0 (Edalati et al., 2212.10650).

    No matrix of the kernel's size is made: x is read as [k, K/k]. Several terms may share a number of the code.

    Attributes:
      inputs: k, a divisor of the product's inputs.
      outputs: n, a divisor of its outputs.
      terms: of the sum, a multiple of the numbers of the code.
    """

    name: ClassVar[str] = "kronecker"
    inputs: int = 64
    outputs: int = 64
    terms: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "inputs", "outputs", "terms", least=1)

    def check(self, site: str, inputs: int, outputs: int, numbers: int) -> None:
        """Raise ValueError where factors do not divide the product, or numbers of the code the terms."""
        if inputs % self.inputs or outputs % self.outputs:
            raise ValueError(
                f"Kronecker(inputs={self.inputs}, outputs={self.outputs}) at site {site!r}, which has {inputs} inputs "
                f"and {outputs} outputs: use divisors"
            )
        if self.terms % numbers:
            raise ValueError(
                f"Kronecker.terms = {self.terms} at site {site!r}, where the code has {numbers} numbers: use a multiple"
            )

    def params(self, inputs: int, outputs: int, numbers: int) -> dict[str, Param]:
        """Return V and U of all terms."""
        left = self.terms, self.inputs, self.outputs
        right = self.terms, inputs // self.inputs, outputs // self.outputs
        drawn = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
        return {"v": Param(left, drawn), "u": Param(right, nn.initializers.zeros)}

    def change(
        self,
        own: Own,
        x: Float[Array, "B T K"],
        y: Float[Array, "B T N"],
        code: Float[Array, "#B #T E"],
    ) -> Float[Array, "B T N"]:
        """Return y and the update; sums are in fp32."""
        v, u = own["v"], own["u"]
        rows = x.reshape(*x.shape[:2], v.shape[1], u.shape[1])
        inner = jnp.einsum("btij,eim->btejm", rows, v.astype(x.dtype), preferred_element_type=jnp.float32)
        inner = inner * jnp.repeat(code, self.terms // code.shape[-1], axis=-1)[..., None, None]
        update = jnp.einsum(
            "btejm,ejn->btmn", inner.astype(x.dtype), u.astype(x.dtype), preferred_element_type=jnp.float32
        )
        return y + update.reshape(y.shape)

    def at_code(self, own: Own, code: Float[Array, "E"]) -> dict[str, Float[Array, "..."]]:
        """Return the factors, the first of each term times its number."""
        return {**own, "v": own["v"] * jnp.repeat(code, self.terms // len(code))[:, None, None]}

    def merge(
        self, own: Own, kernel: Float[Array, "K N"], shift: Float[Array, "N"] | None
    ) -> tuple[Float[Array, "K N"], Float[Array, "N"] | None]:
        """Return the kernel and the sum of the products."""
        update = jnp.einsum("eim,ejn->ijmn", own["v"], own["u"], precision=HIGHEST)
        return kernel + update.reshape(kernel.shape), shift
