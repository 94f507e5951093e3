"""The product of an array and a weight, written as an einsum, in the form that the device is fastest at."""

from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxblt.parallel.islands import open_axes
from jaxblt.parallel.sequence import seq_axis
from pallas_kernels.runtime import current_device

PRODUCT = "product"
"""The `checkpoint_name` of products with a weight that remat's "dots" does not recognise."""


def multiply(
    equation: str,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: Any = None,
) -> Float[Array, "..."]:
    """Multiply x by a kernel: `jnp.einsum`, or for channel-major arrays on GPUs a GEMM a row.

    XLA makes one GEMM of an einsum with several rows, and transposes channel-major arrays in a pass of its own. On a
    CPU it keeps the sums of such a product in 16 bits if x has them, so both are widened there. One token on a GPU is
    multiplied in parts. Heads are one axis in a product on one GPU.
    """
    if is_one_token(equation, x, kernel):
        return multiply_token(equation, x, kernel).astype(preferred_element_type or x.dtype)
    if is_by_row(equation, x, kernel):
        y: Any = multiply_by_row(equation, x, kernel, precision, preferred_element_type)
        return checkpoint_name(y, PRODUCT)
    kinds: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    if is_by_head(equation, kernel):
        return multiply_flat(equation, x, kernel, **kinds)
    if rounds_sums(equation, x):
        wide = jnp.einsum(equation, x.astype(jnp.float32), kernel.astype(jnp.float32), precision=precision)
        return wide.astype(preferred_element_type or x.dtype)
    return jnp.einsum(equation, x, kernel, **kinds)


class Letters(NamedTuple):
    """The letters of a `Linear`'s equation.

    Attributes:
      given: the letters of x.
      summed, new: the kernel's letters that x has, and those that x does not have.
      result: the letters of y.
    """

    given: str
    summed: str
    new: str
    result: str

    @property
    def lead(self) -> str:
        """The letters of x that are not summed over."""
        return "".join(c for c in self.given if c not in self.summed)

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The letters of x and of y, each with those of its channels."""
        return (self.given, self.summed), (self.result, self.new)

    @property
    def channels_last(self) -> list[bool]:
        """Whether channels come last in x and in y."""
        return [side == self.lead + c for side, c in self.sides]


def read_equation(equation: str) -> Letters:
    """Split a `Linear`'s equation, such as "btd,dhk->bthk", into its letters."""
    given, _, rest = equation.partition(",")
    letters, _, result = rest.partition("->")
    summed = "".join(c for c in letters if c in given and c not in result)
    return Letters(given, summed, letters[len(summed) :], result)


def is_by_row(equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."]) -> bool:
    """Return whether `multiply` makes a GEMM for each row.

    It does not if rows have fewer positions than the other side of the product has channels. Kernels and gradients a
    row would then be more memory traffic than the transposes.
    """
    letters = read_equation(equation)
    lead, sides, last = letters.lead, letters.sides, letters.channels_last
    first = [side == lead[:1] + c + lead[1:] for side, c in sides]
    ordered = all(a or b for a, b in zip(last, first, strict=True)) and not all(last)
    if not ordered or x.shape[0] == 1 or current_device().platform != "gpu":
        return False
    inner = prod(kernel.shape[: len(letters.summed)])
    other = inner if last[0] else kernel.size // inner
    return other <= x.size // (x.shape[0] * inner)


def is_by_head(equation: str, kernel: Float[Array, "..."]) -> bool:
    """Return whether `multiply` joins the axes of the kernel: on one GPU, where channels come last on both sides.

    Of a kernel with three axes XLA makes a gradient with its axes in another order, which it then transposes together
    with both moments. Devices may share heads, so their kernels keep the axis.
    """
    is_last = all(read_equation(equation).channels_last)
    return kernel.ndim > 2 and is_last and not open_axes() and current_device().platform == "gpu"


def multiply_flat(
    equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."], **kinds: Any
) -> Float[Array, "..."]:
    """Multiply by the kernel as a matrix."""
    count = len(read_equation(equation).summed)
    lead, inner = x.shape[: x.ndim - count], prod(kernel.shape[:count])
    y = jnp.einsum("...d,de->...e", x.reshape(*lead, inner), kernel.reshape(inner, -1), **kinds)
    return y.reshape(*lead, *kernel.shape[count:])


def rounds_sums(equation: str, x: Float[Array, "..."]) -> bool:
    """Return whether XLA would keep the sums of this product in 16 bits: of channel-major arrays on a CPU."""
    narrow = jnp.finfo(x.dtype).bits < 32 and current_device().platform == "cpu"
    return narrow and not all(read_equation(equation).channels_last)


PARTS = 8
"""Parts of the sums of a product of one token."""


def is_one_token(equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."]) -> bool:
    """Return whether `multiply` sums in parts: one token of 16 bits on one GPU.

    XLA would write each weight times its channel to memory, and read that again to add it up.
    """
    given, summed, new, result = read_equation(equation)
    inner = prod(kernel.shape[: len(summed)])
    ordered = all("".join(c for c in a if c in b) == b for a, b in ((given, summed), (result, new)))
    alone = x.size == inner and inner % PARTS == 0 and ordered and not open_axes()
    return alone and jnp.finfo(x.dtype).bits == 16 and current_device().platform == "gpu"


def multiply_token(equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x W of one token in fp32: one pass over the kernel, as the parts of a sum fill the device.

    The parts are added up one after another, which XLA fuses with what reads y.
    """
    given, summed, new, result = (letters.replace("...", "") for letters in read_equation(equation))
    inner = prod(kernel.shape[: len(summed)])
    token, matrix = (a.reshape(PARTS, inner // PARTS, -1).astype(jnp.float32) for a in (x, kernel))
    y = reduce(jnp.add, jnp.sum(token * matrix, 1))
    sizes = dict(zip(new, kernel.shape[len(summed) :], strict=True))
    shape = [1] * (x.ndim - len(given)) + [sizes.get(c, 1) for c in result]
    return y.reshape(shape)


@partial(jax.custom_jvp, nondiff_argnums=(0, 3, 4))
def multiply_by_row(
    equation: str,
    x: Float[Array, "B ..."],
    kernel: Float[Array, "..."],
    precision: jax.lax.PrecisionLike,
    preferred_element_type: Any,
) -> Float[Array, "B ..."]:
    """Multiply by a GEMM a row; all rows read one kernel, broadcast by a stride of 0.

    Its gradient is one matrix a row, and these are added up in fp32. If devices split time, the gradient is that of the
    einsum, one GEMM over all rows: devices would otherwise exchange a matrix for each row.
    """
    # Flatten first: XLA would write out a broadcast kernel of more than two axes
    flat = kernel.reshape(prod(kernel.shape[: len(read_equation(equation).summed)]), -1)
    flat = jnp.broadcast_to(flat, (x.shape[0], *flat.shape))
    return _rows(equation, x, flat, kernel.shape, precision, preferred_element_type)


def _rows(
    equation: str,
    x: Float[Array, "B ..."],
    flat: Float[Array, "B K N"],
    shape: tuple[int, ...],
    precision: jax.lax.PrecisionLike,
    preferred_element_type: Any,
) -> Float[Array, "B ..."]:
    """Multiply each row by a kernel of its own, which has this `shape` if it is not flat."""
    given, summed, new, result = letters = read_equation(equation)
    rows, inner = flat.shape[:2]
    sizes = dict(zip(given, x.shape, strict=True)) | dict(zip(summed + new, shape, strict=True))
    into = "btk" if given.startswith(letters.lead) else "bkt"
    out = "btn" if result.startswith(letters.lead) else "bnt"
    x = x.reshape(rows, inner, -1) if into == "bkt" else x.reshape(rows, -1, inner)
    kinds: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    return jnp.einsum(f"{into},bkn->{out}", x, flat, **kinds).reshape([sizes[c] for c in result])


@partial(multiply_by_row.defjvp, symbolic_zeros=True)
def _multiply_by_row_jvp(
    equation: str,
    precision: jax.lax.PrecisionLike,
    preferred_element_type: Any,
    primals: tuple[Any, Any],
    tangents: tuple[Any, Any],
) -> tuple[Float[Array, "B ..."], Float[Array, "B ..."]]:
    (x, kernel), (dx, dkernel) = primals, tangents
    kinds: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    by_row: Any = partial(multiply_by_row, equation)
    y = by_row(x, kernel, *kinds.values())
    dy = jnp.zeros_like(y)
    if not isinstance(dx, SymbolicZero):
        dy += by_row(dx, kernel, *kinds.values())
    if not isinstance(dkernel, SymbolicZero):
        if seq_axis(x) is not None:
            return y, dy + jnp.einsum(equation, x, dkernel, **kinds)
        # Widen first, so that the transpose adds rows in fp32: in bf16 each sum would be rounded
        wide = dkernel.dtype if jnp.finfo(dkernel.dtype).bits > 32 else jnp.float32
        flat = dkernel.reshape(prod(dkernel.shape[: len(read_equation(equation).summed)]), -1).astype(wide)
        flat = jnp.broadcast_to(flat, (x.shape[0], *flat.shape)).astype(dkernel.dtype)
        dy += _rows(equation, x, flat, dkernel.shape, *kinds.values())
    return y, dy
