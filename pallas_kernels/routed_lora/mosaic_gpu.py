"""Hopper: every output written once, with the update summed where the product with the weight is.

XLA makes z = scale (x V) * c of all sites in one read of x, and likewise s of the cotangents. The kernel then makes
y = x W + z U of all sites in one call, and dx = sum dy W^T + s V^T in one more. Backward keeps the inputs and makes p
again; the gradients of V, U, W and c are XLA's.

The ranks of all sites lie side by side in z, filled up with zeros to a multiple of 64. A site multiplies the columns of
its own ranks, from a multiple of 64 to a multiple of 64, with U and rows of zeros for ranks of others.

With channels first a tile has tokens of one row. The kernel writes y and reads dy as they lie; XLA transposes s.

With `active` a kernel makes z too. In z, y and dx each tile of tokens takes only those steps of 64 ranks that have an
active block. What XLA makes backward skips nothing.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.routed_lora.active import masked
from pallas_kernels.routed_lora.grid import Side, Term
from pallas_kernels.routed_lora.hopper import STEP, TILE, UNIT
from pallas_kernels.routed_lora.mosaic_gpu_down import listed_down
from pallas_kernels.routed_lora.mosaic_gpu_product import sums_of_products
from pallas_kernels.routed_lora.products import product
from pallas_kernels.routed_lora.reference import Matrices
from pallas_kernels.routed_lora.steps import Steps, active_steps, listed
from pallas_kernels.routed_lora.xla import Options, gradients, joined, scaled


def routed_lora_mosaic_gpu(
    x: Float[Array, "B T K"],
    w: Matrices,
    v: Matrices,
    u: Matrices,
    code: Float[Array, "B C E"] | None,
    *,
    chunk: int,
    scale: float,
    active: Bool[Array, "tiles E"] | None = None,
    channels_first: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "B _ _"], ...]:
    """Compute `routed_lora`; what `hopper.why_not` refuses is not checked again.

    Args:
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    if code is not None and active is not None:
        code, chunk = masked(code, active, chunk, x.shape[1]), 1
    flat, tree = jax.tree.flatten((x, w, v, u, code, active))
    options = Options(chunk, float(scale), channels_first)
    return _routed(options, interpret, *jax.tree.unflatten(tree, vary_alike(*flat)))


@partial(OwnGradient, nondiff_argnums=(0, 1))
def _routed(
    options: Options,
    interpret: Any,
    x: Any,
    w: Matrices,
    v: Matrices,
    u: Matrices,
    code: Any,
    active: Any,
) -> tuple[Array, ...]:
    terms, up, after = [], [], 0
    for i, (weight, matrix) in enumerate(zip(w, u, strict=True)):
        before, after = after, after + matrix.shape[0]
        start, end = before // STEP * STEP, -(-after // STEP) * STEP
        up.append(jnp.pad(matrix, ((before - start, end - after), (0, 0))))
        terms.append([Term(0, 2 + i, 0, weight.shape[0]), Term(1, 2 + len(w) + i, start, end - start)])
    side: Side = "output" if options.channels_first else None
    if active is None:
        z = _filled(jnp.concatenate(scaled(_down(x, v), v, code, options), -1).astype(x.dtype))
        return _sums([x, z], [*w, *up], terms, x, interpret, channels_first=side)
    steps = active_steps(active, [down.shape[1] for down in v])
    z = _listed_down(options.scale, interpret, x, v, code, steps)
    own = listed(steps, [term for _, term in terms])
    return _sums([x, z], [*w, *up], terms, x, interpret, channels_first=side, listed=own)


def _forward(options: Options, interpret: Any, *given: Any) -> tuple[tuple[Array, ...], Any]:
    return _routed(options, interpret, *given), given


def _backward(options: Options, interpret: Any, kept: Any, dy: tuple[Array, ...]) -> tuple[Any, ...]:
    *given, active = kept
    x, _, v, *_ = given
    side: Side = "left" if options.channels_first else None
    input_gradient = partial(_input_gradient, like=x, active=active, channels_first=side, interpret=interpret)
    return *gradients(options, (*given, _down(x, v)), dy, input_gradient), None


_routed.defvjp(_forward, _backward)


def _down(x: Float[Array, "B T K"], v: Matrices) -> Float[Array, "B T R"]:
    """Return x V of all sites, in fp32: one product, as wide as whole tiles."""
    down = joined(v)
    return product("btk,kr->btr", x, _filled(down), wide=True)[..., : down.shape[1]]


def _listed_down(
    scale: float, interpret: Any, x: Array, v: Matrices, code: Array, steps: Bool[Array, "tiles steps"]
) -> Float[Array, "B T R"]:
    """Return z where a step has an active block, anything elsewhere; `code` is of tokens."""
    tokens = (code.astype(jnp.float32) * jnp.float32(scale)).reshape(-1, code.shape[-1])
    units = [jnp.repeat(tokens, site.shape[1] // code.shape[-1] // UNIT, axis=1) for site in v]
    down, numbers = _filled(joined(v)).astype(x.dtype), jnp.concatenate(units, 1)
    missing = -tokens.shape[0] % TILE, down.shape[1] // UNIT - numbers.shape[1]
    numbers = jnp.pad(numbers, [(0, more) for more in missing]).T
    own = listed(steps, [Term(0, 0, 0, down.shape[1])])
    z = listed_down(_rows(x)[0], down.T, numbers, own, interpret=interpret)
    return z[: tokens.shape[0]].reshape(*x.shape[:2], -1)


def _input_gradient(
    dy: tuple[Array, ...],
    w: Any,
    v: Matrices,
    s: Array,
    *,
    like: Array,
    active: Any,
    channels_first: Side,
    interpret: Any,
) -> Array:
    sites, down = len(w), _filled(joined(v))
    terms = [Term(i, sites + 1 + i, 0, weight.shape[1]) for i, weight in enumerate(w)]
    terms.append(Term(sites, 2 * sites + 1, 0, down.shape[1]))
    s = _filled(s, 1 if channels_first else 2)
    own = active
    if active is not None:
        own = listed(active_steps(active, [site.shape[1] for site in v]), terms[-1:])
    options: dict[str, Any] = {"transposed": True, "channels_first": channels_first, "listed": own}
    return _sums([*dy, s], [*w, down], [terms], like, interpret, **options)[0]


def _sums(
    left: list[Array],
    right: list[Array],
    terms: list[list[Term]],
    like: Float[Array, "B T _"],
    interpret: Any,
    *,
    transposed: bool = False,
    channels_first: Side = None,
    listed: Steps | None = None,
) -> tuple[Array, ...]:
    """Return [B, T, _] or [B, _, T] of each output."""
    flat = channels_first is None
    arrays = [*(map(_rows, left) if flat else left), *right]
    options: dict[str, Any] = {"transposed": transposed, "channels_first": channels_first, "listed": listed}
    found = sums_of_products(
        [array.astype(like.dtype) for array in arrays], terms, **options, interpret=interpret
    )
    batch, length, _ = like.shape
    return tuple(y[0, : batch * length].reshape(batch, length, -1) if flat else y for y in found)


def _rows(x: Float[Array, "B T K"]) -> Float[Array, "1 M K"]:
    """Lay all tokens below each other, filled to a multiple of 8, as the copy engine wants it."""
    rows = x.reshape(1, -1, x.shape[-1])
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % 8), (0, 0)))


def _filled(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Fill ranks up to a multiple of 64."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = 0, -x.shape[axis] % STEP
    return jnp.pad(x, missing)
