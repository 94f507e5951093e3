"""Matrix products of wide arrays on narrow operands, forward and backward."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._dispatch import current_device
from pallas_kernels._own_gradient import OwnGradient


def product(equation: str, a: Float[Array, "..."], b: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Return einsum(equation, a, b) with operands rounded to `dtype` and wide sums.

    In its gradient the cotangent is rounded to `dtype` as well: a product of a wide and a narrow array would miss the
    tensor cores. Each index of an operand stands in the other operand or in the result.
    """
    a, b = vary_alike(a, b)
    return _product(a, b, equation, dtype, a.dtype, b.dtype)


def multiply(
    equation: str, a: Float[Array, "..."], b: Float[Array, "..."], result: Any = None
) -> Float[Array, "..."]:
    """Return the einsum of operands of one dtype, summed in its accumulator; see `product`.

    Args:
      equation: what indices stand where.
      a: one operand.
      b: the other one.
      result: dtype that the sums are rounded to; None keeps the accumulator's. Ask for it here: XLA keeps the wide
        result of a product that is cast and then widened again.
    """
    kind, wide = jnp.finfo(a.dtype), accumulator(a.dtype)
    if kind.bits < 32 and current_device().platform == "cpu":
        # Widen on CPUs: XLA (jax 0.11.2) compiles some products of bf16 arrays to a call that it does not have.
        a, b = (lax.reduce_precision(x.astype(wide), kind.nexp, kind.nmant) for x in (a, b))
    exact = lax.Precision.HIGHEST if kind.bits >= 32 else lax.Precision.DEFAULT
    given = wide if a.dtype == wide else result or wide
    return jnp.einsum(equation, a, b, precision=exact, preferred_element_type=given).astype(result or wide)


@partial(OwnGradient, nondiff_argnums=(2, 3, 4, 5))
def _product(a: Array, b: Array, equation: str, dtype: Any, a_dtype: Any, b_dtype: Any) -> Array:
    return multiply(equation, a.astype(dtype), b.astype(dtype))


def _product_fwd(
    a: Array, b: Array, equation: str, dtype: Any, a_dtype: Any, b_dtype: Any
) -> tuple[Array, tuple[Array, Array]]:
    a, b = a.astype(dtype), b.astype(dtype)
    return multiply(equation, a, b), (a, b)


def _product_bwd(
    equation: str, dtype: Any, a_dtype: Any, b_dtype: Any, kept: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    (a, b), g = kept, g.astype(dtype)
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    da, db = multiply(f"{result},{right}->{left}", g, b), multiply(f"{result},{left}->{right}", g, a)
    return da.astype(a_dtype), db.astype(b_dtype)


_product.defvjp(_product_fwd, _product_bwd)
