"""A product with a kernel whose operands are FP8, forward and backward."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jaxblt.einsums import Letters, read_equation
from jaxblt.precision.formats import (
    E4M3,
    E5M2,
    Format,
    largest_entry,
    quantise,
    ratio_for,
    scale_for,
)
from pallas_kernels.runtime import OwnGradient

FAST, EXACT = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST
"""On GPUs the first lets cuBLAS add up in fewer bits; the second adds up gradients in fp32."""
ROLES = ("x", "kernel", "gradient")
"""The operands whose largest entries are remembered, in the order of a history's rows."""


class Past(NamedTuple):
    """Largest entries of each operand in the last steps, newest first; None for scales of the operands themselves.

    The cotangent of each has the entry that this step observed in its first place, and zeros behind it. So what only
    the backward pass sees leaves it like a gradient.
    """

    x: Float[Array, "H"]
    kernel: Float[Array, "H"]
    gradient: Float[Array, "H"]


class Operand(NamedTuple):
    """An operand in FP8, its scale, and its largest entry."""

    value: Array
    scale: Float[Array, ""]
    largest: Float[Array, ""]


class Kind(NamedTuple):
    """What is static of a product: letters of x, of the kernel and of y, and how operands are rounded."""

    x: str
    kernel: str
    y: str
    margin: int
    by_ratio: bool = False
    wide: bool = False


def fp8_product(
    equation: str,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    *,
    past: Past | None = None,
    margin: int = 0,
    rounded: Operand | None = None,
    wide: bool = False,
) -> Float[Array, "..."]:
    """Return x W in the dtype of x from operands in FP8: E4M3 of x and W, and E5M2 of the gradient behind them.

    Each operand has one scale, a power of two. It is chosen by the operand's own largest entry, or by those of `past`;
    then entries may exceed the range, and become its largest number. An operand that is not finite makes y NaN.

    Args:
      equation: of a `Linear`.
      x: the input.
      kernel: in the dtype of x.
      past: largest entries of earlier steps.
      margin: powers of two that are left free.
      rounded: x in E4M3, as `round_once` made it for several products; None rounds it here.
      wide: round the gradient in fp32. Where a product in fp32 makes it, XLA then writes it in FP8 only. From bf16 its
        cost model would write it in bf16 too, and read that twice, for its largest entry and to round it.
    """
    return _product(_kind(equation, x.ndim, margin)._replace(wide=wide), past, rounded, x, kernel)


def round_once(x: Float[Array, "..."], before: Float[Array, "H"] | None, margin: int = 0) -> Operand:
    """Return x in E4M3 for several products, scaled by its own largest entry or by those `before`; no gradient."""
    x, before = jax.lax.stop_gradient((x, before))
    return _operand(x, before, E4M3, Kind("", "", "", margin))


def fp8_by_ratio(
    equation: str,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: Any = None,
) -> Float[Array, "..."]:
    """Return x W from operands in E4M3, scaled as Transformer Engine's current scaling does; a `Product`.

    The scale of an operand is 448 over its own largest entry, of all rows and positions of the call. Entries are scaled
    and rounded in fp32, products are summed in fp32, and the scales undone there. So rows are not independent of
    each other, nor tokens of how a sequence is split into calls. Rows need no padding: zeros change no scale.
    """
    del precision, preferred_element_type  # operands of 8 bits have products that fp32 holds
    return _product(_kind(equation, x.ndim, 0)._replace(by_ratio=True), None, None, x, kernel)


def _kind(equation: str, rank: int, margin: int) -> Kind:
    letters = spell_out(equation, rank)
    return Kind(letters.given, letters.summed + letters.new, letters.result, margin)


def spell_out(equation: str, rank: int) -> Letters:
    """Return a `Linear`'s letters for x of this rank, with letters in the place of an ellipsis."""
    letters = read_equation(equation)
    more = [c for c in "ABCDEFGH" if c not in equation][: rank - len(letters.given.replace("...", ""))]
    given, result = (text.replace("...", "".join(more)) for text in (letters.given, letters.result))
    return letters._replace(given=given, result=result)


def contract(
    left: Array, right: Array, letters: tuple[str, str, str], dtype: Any, precision: jax.lax.Precision
) -> Array:
    """Return the product of two arrays by their letters and those of the result; the dtypes of both may differ."""
    a, b, out = letters
    summed = [c for c in a if c in b]
    dims = ([a.index(c) for c in summed], [b.index(c) for c in summed])
    found = jax.lax.dot_general(
        left, right, (dims, ([], [])), precision=precision, preferred_element_type=dtype
    )
    free = [c for c in a + b if c not in summed]
    return found.transpose([free.index(c) for c in out])


@partial(OwnGradient, nondiff_argnums=(0,))
def _product(kind: Kind, past: Past | None, rounded: Operand | None, x: Array, kernel: Array) -> Array:
    return _forward(kind, past, rounded, x, kernel)[0]


def _operand(x: Array, before: Float[Array, "H"] | None, form: Format, kind: Kind) -> Operand:
    largest, margin = largest_entry(x), kind.margin
    if kind.by_ratio:
        scale = ratio_for(largest, form)
        return Operand(quantise(x.astype(jnp.float32), scale, form), scale, largest)
    scale = scale_for(largest if before is None else jnp.max(before), form, margin)
    # Round in the pass that finds the largest entry: fused with cuBLAS's transposes, that would take one of its own
    return Operand(_hold(quantise(x, scale, form)), scale, largest)


def _hold(x: Array) -> Array:
    """Return x, written with its axes in their order by the pass that makes it.

    XLA would write it in the order of the next product, so that this pass is a transpose.
    """
    return jax.lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))


def _unscaled(y: Array, *operands: Operand) -> Array:
    """Undo the scales of a product's operands; NaN if one of them is not finite, as clipped entries would hide that."""
    inverse = jnp.float32(1)
    for operand in operands:
        inverse = inverse / jnp.where(jnp.isfinite(operand.largest), operand.scale, jnp.nan)
    return y * inverse.astype(y.dtype)


def _forward(
    kind: Kind, past: Past | None, rounded: Operand | None, x: Array, kernel: Array
) -> tuple[Array, Any]:
    left = _operand(x, None if past is None else past.x, E4M3, kind) if rounded is None else rounded
    right = _operand(kernel, None if past is None else past.kernel, E4M3, kind)
    y = contract(left.value, right.value, (kind.x, kind.kernel, kind.y), _summed_in(kind, x), FAST)
    return _unscaled(y, left, right).astype(x.dtype), (left, right, past)


def _backward(kind: Kind, kept: Any, gradient: Array) -> tuple[Past | None, None, Array, Array]:
    left, right, past = kept
    wide = jnp.float32 if kind.wide else gradient.dtype
    own = _operand(gradient.astype(wide), None if past is None else past.gradient, E5M2, kind)
    dtype = _summed_in(kind, gradient)
    value, letters = _channels_last(own.value, kind)
    dx = contract(value, right.value, (letters, kind.kernel, kind.x), dtype, EXACT)
    dkernel = contract(left.value, value, (kind.x, letters, kind.kernel), dtype, EXACT)
    seen = None
    if past is not None:
        found = (left.largest, right.largest, own.largest)
        seen = Past(*(jnp.zeros_like(h).at[0].set(entry) for h, entry in zip(past, found, strict=True)))
    dx, dkernel = (
        _unscaled(*each).astype(gradient.dtype) for each in ((dx, own, right), (dkernel, left, own))
    )
    return seen, None, dx, dkernel


def _channels_last(gradient: Array, kind: Kind) -> tuple[Array, str]:
    """Return a gradient with its channels behind all other axes, and its letters."""
    lead = [c for c in kind.y if c in kind.x]
    letters = "".join(lead + [c for c in kind.y if c not in lead])
    if letters == kind.y:
        return gradient, letters
    # Transpose once: fused with the transpose of the kernel's product, this one would read single bytes far apart
    return _hold(gradient.transpose([kind.y.index(c) for c in letters])), letters


def _summed_in(kind: Kind, x: Array) -> Any:
    """Return the dtype of a product before its scales are undone: a ratio would round a narrower one again."""
    return jnp.float32 if kind.by_ratio else x.dtype


_product.defvjp(_forward, _backward)
