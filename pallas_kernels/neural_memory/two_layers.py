"""f(x) = x + silu(x c M1) c M2, the gradient of its loss by c M1 and c M2, and the derivatives of both, written out.

c is a number for each row and head. It multiplies results of products, which are read anyway: nobody writes c M.

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
from pallas_kernels._own_gradient import OwnGradient

KEPT = "neural_memory_chunk"
"""`checkpoint_name` of what a chunk's backward pass had better keep: errors, and what a token has one number of."""
EPSILON = 1e-6
"""Added to the square of an error that something is divided by."""
Matrices = tuple[Float[Array, "B H K E"], Float[Array, "B H E K"]]


def apply(
    weights: Matrices, x: Float[Array, "B H C K"], dtype: Any, scale: Float[Array, "B H"] | None = None
) -> Float[Array, "B H C K"]:
    """Return f(x), wide; products take operands of `dtype`.

    Without a `scale` c is 1.
    """
    x, c, first, second = vary_alike(x, _one(x, dtype) if scale is None else scale, *weights)
    if has_reference_ops():
        return _apply_fwd(x, first, second, c, accumulator(dtype), x.dtype, first.dtype)[0]
    return _apply(x, first, second, c, dtype, x.dtype, first.dtype)


def gradients(
    weights: Matrices,
    k: Float[Array, "B H C K"],
    v: Float[Array, "B H C K"],
    theta: Float[Array, "B H C"],
    dtype: Any,
    scale: Float[Array, "B H"] | None = None,
) -> tuple[Matrices, Float[Array, "B H C"]]:
    """Return gradients of sum_t theta_t l_t / max(1, sum_t theta_t L_t) by c M1, c M2, and 2 l.

    See `write_memory`.
    """
    c = _one(k, dtype) if scale is None else scale
    k, v, theta, first, second, c = vary_alike(k, v, theta, *weights, c)
    if has_reference_ops():
        return _gradients_fwd(k, v, theta, first, second, c, accumulator(dtype), ())[0]
    return _gradients(k, v, theta, first, second, c, dtype, (k.dtype, v.dtype, first.dtype))


@partial(OwnGradient, nondiff_argnums=(4, 5, 6))
def _apply(
    x: Array, first: Array, second: Array, scale: Array, dtype: Any, x_dtype: Any, dtype_of_weights: Any
) -> Array:
    return _apply_fwd(x, first, second, scale, dtype, x_dtype, dtype_of_weights)[0]


def _apply_fwd(
    x: Array, first: Array, second: Array, scale: Array, dtype: Any, x_dtype: Any, dtype_of_weights: Any
) -> tuple[Array, Any]:
    narrow, first, second = (a.astype(dtype) for a in (x, first, second))
    if x.shape[2] >= x.shape[3]:
        # Keep queries and keys apart: XLA would join them to multiply both with M at once, and copy more than M has.
        first, second = jax.lax.optimization_barrier((first, second))
    hidden = multiply("bhck,bhke->bhce", narrow, first, dtype)
    found = multiply("bhce,bhek->bhck", _bend(hidden, scale).silu.astype(dtype), second)
    return x.astype(found.dtype) + _scaled(found, scale), (narrow, first, second, scale, hidden)


def _apply_bwd(dtype: Any, x_dtype: Any, dtype_of_weights: Any, kept: Any, g: Array) -> tuple[Array, ...]:
    x, first, second, scale, hidden = kept
    narrow, bent = g.astype(dtype), _bend(hidden, scale)
    silu, pushed = bent.silu.astype(dtype), multiply("bhck,bhek->bhce", narrow, second, dtype)
    back = (_scaled(pushed, scale) * bent.slope).astype(dtype)
    by_scale = jnp.sum(_dot(silu, pushed, scale.dtype) + _dot(back, hidden, scale.dtype), -1)
    by_first, by_second = _product("bhck,bhce->bhke", x, back), _product("bhce,bhck->bhek", silu, narrow)
    by_weights = (_scaled(x, scale).astype(dtype_of_weights) for x in (by_first, by_second))
    by_x = g + _scaled(_product("bhce,bhke->bhck", back, first), scale)
    return by_x.astype(x_dtype), *by_weights, by_scale


_apply.defvjp(_apply_fwd, _apply_bwd)


class _Bent(NamedTuple):
    """silu(h), its derivative and its second one, wide."""

    silu: Array
    slope: Array
    curve: Array


def _bend(hidden: Float[Array, "B H C E"], scale: Float[Array, "B H"]) -> _Bent:
    hidden = _scaled(hidden, scale)
    gate = jax.nn.sigmoid(hidden)
    falling = gate * (1 - gate)
    slope = gate + hidden * falling
    return _Bent(hidden * gate, slope, falling * (2 + hidden * (1 - 2 * gate)))


class Pass(NamedTuple):
    """The parts of a chunk's gradient; [B, H, C] for each token, else of the streams' dtype.

    Attributes:
      k, first, second: keys and weights.
      scale: c.
      hidden: k M1.
      bent: silu(c k M1).
      error: f(k) - v.
      back: error M2^T.
      sloped: c times the same, times the derivative of silu.
      keys, lost: squares of the lengths of keys and of errors.
      pushed: of those of `sloped`.
      curvature, share: L, and theta over its divisor.
      total: sum_t theta_t L_t.
    """

    k: Float[Array, "B H C K"]
    first: Float[Array, "B H K E"]
    second: Float[Array, "B H E K"]
    scale: Float[Array, "B H"]
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


@partial(OwnGradient, nondiff_argnums=(6, 7))
def _gradients(
    k: Array, v: Array, theta: Array, first: Array, second: Array, scale: Array, dtype: Any, dtypes: Any
) -> tuple[Matrices, Array]:
    return _gradients_fwd(k, v, theta, first, second, scale, dtype, dtypes)[0]


def _gradients_fwd(
    k: Array, v: Array, theta: Array, first: Array, second: Array, scale: Array, dtype: Any, dtypes: Any
) -> tuple[tuple[Matrices, Array], tuple[Pass, Array, Array]]:
    wide = theta.dtype
    narrow, first, second = (a.astype(dtype) for a in (k, first, second))
    hidden = multiply("bhck,bhke->bhce", narrow, first, dtype)
    silu = _bend(hidden, scale).silu.astype(dtype)
    found = _scaled(multiply("bhce,bhek->bhck", silu, second), scale)
    error = k.astype(wide) + found - v.astype(wide)
    lost = checkpoint_name(_power(error, wide), KEPT)
    error = checkpoint_name(rounded(error, dtype), KEPT)
    at = _look_back(narrow, hidden, error, lost, theta, (first, second), scale)
    # Put the share at the narrower operand of each product, which has fewer numbers to multiply.
    by_first = multiply("bhck,bhce->bhke", _times(at.share, narrow), at.sloped)
    by_second = multiply("bhce,bhck->bhek", at.bent, _times(at.share, error))
    return ((by_first, by_second), lost), (at, theta, v)


def _look_back(
    k: Float[Array, "B H C K"],
    hidden: Float[Array, "B H C E"],
    error: Float[Array, "B H C K"],
    lost: Float[Array, "B H C"],
    theta: Float[Array, "B H C"],
    weights: Matrices,
    scale: Float[Array, "B H"],
) -> Pass:
    """Return what a chunk's gradient is made of, from its errors back.

    `lost` has their squares.
    """
    wide, (first, second) = theta.dtype, weights
    bent = _bend(hidden, scale)
    silu = bent.silu.astype(k.dtype)
    back = multiply("bhck,bhek->bhce", error, second, k.dtype)
    sloped = (_scaled(back, scale) * bent.slope).astype(k.dtype)
    keys, pushed = _power(k.astype(wide), wide), _power(sloped, wide)
    curvature = _power(silu, wide) + keys * pushed / (lost + EPSILON)
    keys, pushed, curvature = (checkpoint_name(x, KEPT) for x in (keys, pushed, curvature))
    total = jnp.sum(theta * curvature, -1, keepdims=True)
    share = theta / jnp.maximum(total, 1)
    arrays = (hidden, silu, error, back, sloped, keys, lost, pushed, curvature, share, total)
    return Pass(k, first, second, scale, *arrays)


def _pull_back(dtype: Any, dtypes: Any, kept: tuple[Pass, Array], g: Any) -> tuple[Array, ...]:
    """Return derivatives of `gradients` by k, v, theta and both weights.

    `dtypes` are those of k, v and weights. Last by c, token by token, times nothing but what it multiplies before silu
    and behind M2^T.
    """
    at, theta = kept
    (by_first, by_second), by_lost = g
    wide, scale = theta.dtype, at.scale
    by_first, by_second = by_first.astype(dtype), by_second.astype(dtype)
    k, error, back = at.k.astype(wide), at.error.astype(wide), _scaled(at.back, scale)
    # Go back through share * k and share * error, of which the two gradients are products.
    by_keys = _product("bhce,bhke->bhck", at.sloped, by_first)
    by_errors = _product("bhce,bhek->bhck", at.bent, by_second)
    by_theta, by_curvature = _through_shares(at, theta, jnp.sum(by_keys * k + by_errors * error, -1))
    # Go back through the curvature, a sum of the powers of silu and of what comes back.
    part = by_curvature / (at.lost + EPSILON)
    by_lost = by_lost - part * at.keys * at.pushed / (at.lost + EPSILON)
    # Make silu's derivative from hidden units again: XLA would write it, wide, where `_look_back` takes powers.
    hidden = jax.lax.optimization_barrier(at.hidden)
    bent, share = _bend(hidden, scale), at.share[..., None]
    pushed = _product("bhck,bhke->bhce", at.k, by_first)
    by_sloped = share * pushed + (2 * part * at.keys)[..., None] * back * bent.slope
    by_back = (by_sloped * bent.slope).astype(dtype)
    by_errors = share * by_errors + 2 * by_lost[..., None] * error
    by_errors += _scaled(_product("bhce,bhek->bhck", by_back, at.second), scale)
    narrow, scaled = by_errors.astype(dtype), _scaled(by_errors, scale).astype(dtype)
    by_silu = _by_silu((_times(at.share, at.error), scaled), (by_second, at.second))
    by_silu = by_silu + 2 * by_curvature[..., None] * bent.silu
    by_hidden = by_silu * bent.slope + by_sloped * back * bent.curve
    by_hidden = by_hidden.astype(dtype)
    by_k = by_errors + share * by_keys + (2 * part * at.pushed)[..., None] * k
    by_k += _scaled(_product("bhce,bhke->bhck", by_hidden, at.first), scale)
    by_second = _by_second((by_back, at.bent), (at.error, narrow))
    by_first = multiply("bhck,bhce->bhke", at.k, by_hidden)
    by_scale = _dot(by_hidden, hidden, wide) + _dot(by_back, at.back, wide)
    of_k, of_v, of_weights = dtypes
    found = by_k.astype(of_k), (-by_errors).astype(of_v), by_theta
    weights = (_scaled(x, scale).astype(of_weights) for x in (by_first, by_second))
    return *found, *weights, by_scale


def _gradients_bwd(dtype: Any, dtypes: Any, kept: tuple[Pass, Array, Array], g: Any) -> tuple[Array, ...]:
    at, theta, v = kept
    *found, by_scale = _pull_back(dtype, dtypes, (at, theta), g)
    # Divide out c: f(k) - k is c times the last thing that it multiplies.
    k, v, error, by_v = (x.astype(theta.dtype) for x in (at.k, v, at.error, found[1]))
    by_scale -= jnp.sum(by_v * (error + v - k), -1) / at.scale[..., None]
    return *found, jnp.sum(by_scale, -1)


_gradients.defvjp(_gradients_fwd, _gradients_bwd)


def _through_shares(at: Pass, theta: Array, g: Array) -> tuple[Array, Array]:
    """Return derivatives by theta and by the curvature, of those by the shares."""
    divisor = jnp.maximum(at.total, 1)
    by_total = -jnp.sum(g * at.share, -1, keepdims=True) / divisor
    by_total = jnp.where(at.total > 1, by_total, 0)
    return g / divisor + by_total * at.curvature, by_total * theta


def _by_silu(left: tuple[Array, Array], right: tuple[Array, Array]) -> Float[Array, "B H C E"]:
    """Sum the products of both pairs, [B, H, C, K] and [B, H, E, K].

    It is one product unless its operands cost more.
    """
    tokens, width = left[0].shape[2:]
    if tokens > 2 * width:
        return _product("bhck,bhek->bhce", jnp.concatenate(left, -1), jnp.concatenate(right, -1))
    first, second = (_product("bhck,bhek->bhce", *pair) for pair in zip(left, right, strict=True))
    return first + second


def _by_second(left: tuple[Array, Array], right: tuple[Array, Array]) -> Float[Array, "B H E K"]:
    """Multiply as `_by_silu` does [B, H, C, E] and [B, H, C, K], wide."""
    tokens, width = right[0].shape[2:]
    if tokens < width:
        return multiply("bhce,bhck->bhek", jnp.concatenate(left, 2), jnp.concatenate(right, 2))
    first, second = (multiply("bhce,bhck->bhek", *pair) for pair in zip(left, right, strict=True))
    return first + second


def _product(equation: str, a: Array, b: Array) -> Array:
    """Multiply operands of one dtype, rounded to it and wide again.

    A wide result takes as long to write as to compute.
    """
    return multiply(equation, a, b, a.dtype).astype(accumulator(a.dtype))


def _one(x: Float[Array, "B H C K"], dtype: Any) -> Float[Array, "B H"]:
    return jnp.ones(x.shape[:2], accumulator(dtype))


def _scaled(x: Float[Array, "B H _ _"], scale: Float[Array, "B H"]) -> Float[Array, "B H _ _"]:
    """Scale x, wide."""
    return scale[..., None, None] * x.astype(scale.dtype)


def rounded(x: Array, dtype: Any) -> Array:
    """Round x to a narrower dtype.

    XLA would go on with the wide numbers, and write them, where they are widened again.
    """
    return x if x.dtype == dtype else jax.lax.optimization_barrier(x.astype(dtype))


def _times(share: Float[Array, "B H C"], x: Float[Array, "B H C K"]) -> Float[Array, "B H C K"]:
    return (share[..., None] * x.astype(share.dtype)).astype(x.dtype)


def _power(x: Float[Array, "B H C _"], wide: Any) -> Float[Array, "B H C"]:
    return _dot(x, x, wide)


def _dot(a: Float[Array, "B H C _"], b: Float[Array, "B H C _"], wide: Any) -> Float[Array, "B H C"]:
    # Multiply narrow numbers: XLA then takes their sums in the pass that writes them. It takes two for wide ones.
    return jnp.sum((a * b).astype(wide), -1)
