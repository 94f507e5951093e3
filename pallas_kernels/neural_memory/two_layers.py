"""f(x) = x + silu(x M1) M2, the gradient of its loss by M1 and M2, and the derivatives of both, written out.

What has a column for each hidden unit is kept in the dtype of the streams: it is written and read far more often than
anything else. Sums over tokens, and all that a token has one number of, are wide.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._dispatch import has_reference_ops
from pallas_kernels._linear_state.products import multiply

KEPT = "neural_memory_chunk"
"""`checkpoint_name` of what a chunk's backward pass had better keep: errors, and what a token has one number of."""
EPSILON = 1e-6
"""Added to the square of an error that something is divided by."""
Matrices = tuple[Float[Array, "B H K E"], Float[Array, "B H E K"]]


def apply(weights: Matrices, x: Float[Array, "B H C K"], dtype: Any) -> Float[Array, "B H C K"]:
    """f(x), wide; products take operands of `dtype`."""
    x, first, second = vary_alike(x, *weights)
    if has_reference_ops():
        return _apply_fwd(x, first, second, accumulator(dtype), x.dtype, first.dtype)[0]
    return _apply(x, first, second, dtype, x.dtype, first.dtype)


def gradients(
    weights: Matrices,
    k: Float[Array, "B H C K"],
    v: Float[Array, "B H C K"],
    theta: Float[Array, "B H C"],
    dtype: Any,
) -> tuple[Matrices, Float[Array, "B H C"]]:
    """Of sum_t theta_t l_t / max(1, sum_t theta_t L_t) by M1 and M2, and 2 l; see `write_memory`."""
    k, v, theta, first, second = vary_alike(k, v, theta, *weights)
    if has_reference_ops():
        return _gradients_fwd(k, v, theta, first, second, accumulator(dtype), ())[0]
    return _gradients(k, v, theta, first, second, dtype, (k.dtype, v.dtype, first.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _apply(x: Array, first: Array, second: Array, dtype: Any, x_dtype: Any, dtype_of_weights: Any) -> Array:
    return _apply_fwd(x, first, second, dtype, x_dtype, dtype_of_weights)[0]


def _apply_fwd(
    x: Array, first: Array, second: Array, dtype: Any, x_dtype: Any, dtype_of_weights: Any
) -> tuple[Array, Any]:
    narrow, first, second = (a.astype(dtype) for a in (x, first, second))
    hidden = multiply("bhck,bhke->bhce", narrow, first, dtype)
    found = multiply("bhce,bhek->bhck", _bend(hidden).silu.astype(dtype), second)
    return x.astype(found.dtype) + found, (narrow, first, second, hidden)


def _apply_bwd(dtype: Any, x_dtype: Any, dtype_of_weights: Any, kept: Any, g: Array) -> tuple[Array, ...]:
    x, first, second, hidden = kept
    narrow, bent = g.astype(dtype), _bend(hidden)
    back = (_product("bhck,bhek->bhce", narrow, second) * bent.slope).astype(dtype)
    by_first = multiply("bhck,bhce->bhke", x, back, dtype_of_weights)
    by_second = multiply("bhce,bhck->bhek", bent.silu.astype(dtype), narrow, dtype_of_weights)
    return (g + _product("bhce,bhke->bhck", back, first)).astype(x_dtype), by_first, by_second


_apply.defvjp(_apply_fwd, _apply_bwd)


class _Bent(NamedTuple):
    """silu(h), its derivative and its second one, wide."""

    silu: Array
    slope: Array
    curve: Array


def _bend(hidden: Float[Array, "B H C E"]) -> _Bent:
    hidden = hidden.astype(accumulator(hidden.dtype))
    gate = jax.nn.sigmoid(hidden)
    falling = gate * (1 - gate)
    slope = gate + hidden * falling
    return _Bent(hidden * gate, slope, falling * (2 + hidden * (1 - 2 * gate)))


class Pass(NamedTuple):
    """What a chunk's gradient is made of; [B, H, C] for each token, else of the streams' dtype.

    Attributes:
      k, first, second: keys and weights.
      hidden: k M1.
      bent: silu of it.
      error: f(k) - v.
      back: error M2^T.
      sloped: the same times the derivative of silu.
      keys, lost: squares of the lengths of keys and of errors.
      pushed: of those of `sloped`.
      curvature, share: L, and theta over its divisor.
      total: sum_t theta_t L_t.
    """

    k: Float[Array, "B H C K"]
    first: Float[Array, "B H K E"]
    second: Float[Array, "B H E K"]
    hidden: Float[Array, "B H C E"]
    bent: Float[Array, "B H C E"]
    error: Float[Array, "B H C K"]
    back: Float[Array, "B H C E"]
    sloped: Float[Array, "B H C E"]
    keys: Float[Array, "B H C"]
    lost: Float[Array, "B H C"]
    pushed: Float[Array, "B H C"]
    curvature: Float[Array, "B H C"]
    share: Float[Array, "B H C"]
    total: Float[Array, "B H 1"]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _gradients(
    k: Array, v: Array, theta: Array, first: Array, second: Array, dtype: Any, dtypes: Any
) -> tuple[Matrices, Array]:
    return _gradients_fwd(k, v, theta, first, second, dtype, dtypes)[0]


def _gradients_fwd(
    k: Array, v: Array, theta: Array, first: Array, second: Array, dtype: Any, dtypes: Any
) -> tuple[tuple[Matrices, Array], tuple[Pass, Array]]:
    wide = theta.dtype
    narrow, first, second = (a.astype(dtype) for a in (k, first, second))
    hidden = multiply("bhck,bhke->bhce", narrow, first, dtype)
    silu = _bend(hidden).silu.astype(dtype)
    error = k.astype(wide) + multiply("bhce,bhek->bhck", silu, second) - v.astype(wide)
    lost = checkpoint_name(_power(error, wide), KEPT)
    error = checkpoint_name(rounded(error, dtype), KEPT)
    at = look_back(narrow, hidden, error, lost, theta, (first, second))
    # The share stands at the narrower operand of each product, which has fewer numbers to multiply.
    by_first = multiply("bhck,bhce->bhke", _times(at.share, narrow), at.sloped)
    by_second = multiply("bhce,bhck->bhek", at.bent, _times(at.share, error))
    return ((by_first, by_second), lost), (at, theta)


def look_back(
    k: Float[Array, "B H C K"],
    hidden: Float[Array, "B H C E"],
    error: Float[Array, "B H C K"],
    lost: Float[Array, "B H C"],
    theta: Float[Array, "B H C"],
    weights: Matrices,
) -> Pass:
    """What a chunk's gradient is made of, from its errors back; `lost` has their squares."""
    wide, (first, second) = theta.dtype, weights
    bent = _bend(hidden)
    silu = bent.silu.astype(k.dtype)
    back = multiply("bhck,bhek->bhce", error, second, k.dtype)
    sloped = (back.astype(wide) * bent.slope).astype(k.dtype)
    keys, pushed = _power(k.astype(wide), wide), _power(sloped, wide)
    curvature = _power(silu, wide) + keys * pushed / (lost + EPSILON)
    keys, pushed, curvature = (checkpoint_name(x, KEPT) for x in (keys, pushed, curvature))
    total = jnp.sum(theta * curvature, -1, keepdims=True)
    share = theta / jnp.maximum(total, 1)
    return Pass(
        k, first, second, hidden, silu, error, back, sloped, keys, lost, pushed, curvature, share, total
    )


def gradients_bwd(dtype: Any, dtypes: Any, kept: tuple[Pass, Array], g: Any) -> tuple[Array, ...]:
    """Of `gradients`, by k, v, theta and both weights, in `dtypes` of k, v and weights."""
    at, theta = kept
    (by_first, by_second), by_lost = g
    wide = theta.dtype
    by_first, by_second = by_first.astype(dtype), by_second.astype(dtype)
    k, error = at.k.astype(wide), at.error.astype(wide)
    # Through share * k and share * error, of which the two gradients are products.
    by_keys = _product("bhce,bhke->bhck", at.sloped, by_first)
    by_errors = _product("bhce,bhek->bhck", at.bent, by_second)
    by_theta, by_curvature = _through_shares(at, theta, jnp.sum(by_keys * k + by_errors * error, -1))
    # Through the curvature, a sum of the powers of silu and of what comes back.
    part = by_curvature / (at.lost + EPSILON)
    by_lost = by_lost - part * at.keys * at.pushed / (at.lost + EPSILON)
    bent, share = _bend(at.hidden), at.share[..., None]
    pushed = _product("bhck,bhke->bhce", at.k, by_first)
    by_sloped = share * pushed + (2 * part * at.keys)[..., None] * at.back.astype(wide) * bent.slope
    by_back = (by_sloped * bent.slope).astype(dtype)
    by_errors = share * by_errors + 2 * by_lost[..., None] * error
    by_errors += _product("bhce,bhek->bhck", by_back, at.second)
    narrow = by_errors.astype(dtype)
    by_silu = _side_by_side((_times(at.share, at.error), narrow), (by_second, at.second))
    by_silu = by_silu + 2 * by_curvature[..., None] * bent.silu
    by_hidden = by_silu * bent.slope + by_sloped * at.back.astype(wide) * bent.curve
    by_hidden = by_hidden.astype(dtype)
    by_k = by_errors + share * by_keys + (2 * part * at.pushed)[..., None] * k
    by_k += _product("bhce,bhke->bhck", by_hidden, at.first)
    by_second = multiply("bhce,bhck->bhek", by_back, at.error)
    by_second += multiply("bhce,bhck->bhek", at.bent, narrow)
    by_first = multiply("bhck,bhce->bhke", at.k, by_hidden)
    of_k, of_v, of_weights = dtypes
    found = by_k.astype(of_k), (-by_errors).astype(of_v), by_theta
    return *found, by_first.astype(of_weights), by_second.astype(of_weights)


_gradients.defvjp(_gradients_fwd, gradients_bwd)


def _through_shares(at: Pass, theta: Array, g: Array) -> tuple[Array, Array]:
    """Derivatives by theta and by the curvature, of those by the shares."""
    divisor = jnp.maximum(at.total, 1)
    by_total = -jnp.sum(g * at.share, -1, keepdims=True) / divisor
    by_total = jnp.where(at.total > 1, by_total, 0)
    return g / divisor + by_total * at.curvature, by_total * theta


def _side_by_side(left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
    """Sum of the products of both pairs, as one product."""
    return _product("bhck,bhek->bhce", jnp.concatenate(left, -1), jnp.concatenate(right, -1))


def _product(equation: str, a: Array, b: Array) -> Array:
    """Of operands of one dtype, rounded to it and wide again: a wide result takes as long to write as to compute."""
    return multiply(equation, a, b, a.dtype).astype(accumulator(a.dtype))


def rounded(x: Array, dtype: Any) -> Array:
    """x in a narrower dtype. XLA would go on with the wide numbers, and write them, where they are widened again."""
    return x if x.dtype == dtype else jax.lax.optimization_barrier(x.astype(dtype))


def _times(share: Float[Array, "B H C"], x: Float[Array, "B H C K"]) -> Float[Array, "B H C K"]:
    return (share[..., None] * x.astype(share.dtype)).astype(x.dtype)


def _power(x: Float[Array, "B H C _"], wide: Any) -> Float[Array, "B H C"]:
    # Square the narrow numbers: XLA then takes them and their sums in one pass. It takes two for wide ones.
    return jnp.sum((x * x).astype(wide), -1)
