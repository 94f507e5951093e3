"""What a chunk of tokens does: reads of the memory before it, and the step of gradient descent behind it.

The gradient is written out: with `Linear` layers f = x + silu(x M1) M2 it takes five products, and a read takes two.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._dispatch import has_reference_ops
from pallas_kernels._linear_state.products import product

EPSILON = 1e-6
"""Added to the square of an error that something is divided by."""
REACH = 4.0
"""Length that a memory may have, in lengths of a first matrix of entries of variance 1 / K."""

Weights = tuple[Float[Array, "B H _ _"], ...]
"""Of f: (M,) of x M, or (M1, M2) of x + silu(x M1) M2; one memory for each row and head."""


class MemoryState(NamedTuple):
    """A memory between two chunks.

    Attributes:
      weights: M, fp32 (f64 for f64).
      momentum: S, of the same shapes.
    """

    weights: Weights
    momentum: Weights


class Chunk(NamedTuple):
    """The C tokens of a chunk, zero at holes.

    Attributes:
      k, v: what is to be stored at which key.
      theta: step size of each token.
      eta, alpha: momentum and forgetting that each token asks for; the chunk's are their means over tokens.
      content: True for tokens.
    """

    k: Float[Array, "B H C K"]
    v: Float[Array, "B H C K"]
    theta: Float[Array, "B H C"]
    eta: Float[Array, "B H C"]
    alpha: Float[Array, "B H C"]
    content: Bool[Array, "B C"]


class Trace(NamedTuple):
    """What happened at writes, without gradients. Per token it is zero but at the last of each chunk.

    Attributes:
      surprise: mean of |f(k) - v|^2 / 2 over the chunk's tokens, before it is written.
      weights: length of all of M behind the write.
      momentum: length of all of S behind it.
    """

    surprise: Float[Array, "B *T H"]
    weights: Float[Array, "B *T H"]
    momentum: Float[Array, "B *T H"]


def multiply(
    equation: str, a: Float[Array, "..."], b: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """einsum(equation, a, b) of operands of `dtype`, summed wide; each index stands in the other or in the result."""
    if has_reference_ops():
        return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)
    return product(equation, a, b, dtype)


def read_memory(weights: Weights, q: Float[Array, "B H C K"], dtype: Any) -> Float[Array, "B H C K"]:
    """f_M(q), wide; products take operands of `dtype`."""
    return _apply(weights, q, dtype)[0]


def write_memory(state: MemoryState, chunk: Chunk, dtype: Any) -> tuple[MemoryState, Trace]:
    """The memory behind a chunk; one without a token leaves it as it is.

    S' = eta S - G, M' = (1 - alpha) M + S', with G the gradient by M of sum_t theta_t l_t over
    max(1, sum_t theta_t L_t), where l_t = |f_M(k_t) - v_t|^2 / 2 and L_t = |grad l_t|^2 / (2 l_t). Both are then scaled
    by the same number, so that M' is no longer than `longest`.
    """
    wide, count = state.weights[0].dtype, jnp.sum(chunk.content, 1, dtype=jnp.int32)
    content = chunk.content[:, None].astype(wide)
    eta, alpha = (_mean(x.astype(wide), content)[..., None, None] for x in (chunk.eta, chunk.alpha))
    gradients, loss = _gradients(state.weights, chunk, chunk.theta.astype(wide) * content, dtype)
    momentum = tuple(eta * s - g for s, g in zip(state.momentum, gradients, strict=True))
    weights = tuple((1 - alpha) * m + s for m, s in zip(state.weights, momentum, strict=True))
    some = (count > 0).reshape(-1, 1, 1, 1)
    kept = jnp.where(some, limit(weights)[..., None, None], 1)
    weights, momentum = (
        tuple(jnp.where(some, kept * x, old) for x, old in zip(new, before, strict=True))
        for new, before in ((weights, state.weights), (momentum, state.momentum))
    )
    trace = Trace(_mean(loss, content), *(jnp.sqrt(_square(x)) for x in (weights, momentum)))
    return MemoryState(weights, momentum), jax.tree.map(jax.lax.stop_gradient, trace)


def longest(hidden: int) -> float:
    """The length that a memory may have: `REACH` times that of a [K, hidden] matrix of entries of variance 1 / K."""
    return REACH * math.sqrt(hidden)


def limit(weights: Weights) -> Float[Array, "B H"]:
    """What a memory is scaled by, so that it is no longer than `longest`."""
    most = longest(weights[0].shape[-1])
    # Keep the root away from zero: its derivative there is infinite.
    return most * jax.lax.rsqrt(jnp.maximum(_square(weights), most**2))


def _apply(
    weights: Weights, x: Float[Array, "B H C K"], dtype: Any
) -> tuple[Float[Array, "B H C K"], Float[Array, "B H C E"] | None]:
    """f_M(x), and x M1 of a memory of two layers."""
    if len(weights) == 1:
        return multiply("bhck,bhkv->bhcv", x, weights[0], dtype), None
    first, second = weights
    hidden = multiply("bhck,bhke->bhce", x, first, dtype)
    found = multiply("bhce,bhek->bhck", jax.nn.silu(hidden), second, dtype)
    return x.astype(found.dtype) + found, hidden


def _gradients(
    weights: Weights, chunk: Chunk, theta: Float[Array, "B H C"], dtype: Any
) -> tuple[Weights, Float[Array, "B H C"]]:
    """Of sum_t theta_t l_t / max(1, sum_t theta_t L_t) by M, and l."""
    found, hidden = _apply(weights, chunk.k, dtype)
    error = found - chunk.v.astype(found.dtype)
    lost, keys = _power(error), _power(chunk.k.astype(found.dtype))
    if hidden is None:
        share = _shares(theta, keys)
        return (multiply("bhck,bhcv->bhkv", chunk.k, share * error, dtype),), lost / 2
    gate = jax.nn.sigmoid(hidden)
    back = multiply("bhck,bhek->bhce", error, weights[1], dtype) * (gate * (1 + hidden * (1 - gate)))
    share = _shares(theta, _power(hidden * gate) + keys * _power(back) / (lost + EPSILON))
    second = multiply("bhce,bhck->bhek", hidden * gate, share * error, dtype)
    return (multiply("bhck,bhce->bhke", chunk.k, share * back, dtype), second), lost / 2


def _shares(theta: Float[Array, "B H C"], curvature: Float[Array, "B H C"]) -> Float[Array, "B H C 1"]:
    """What a token's gradient counts: the step stays within twice that of Polyak, 2 l / |grad l|^2."""
    return (theta / jnp.maximum(jnp.sum(theta * curvature, -1, keepdims=True), 1))[..., None]


def _power(x: Float[Array, "B H C _"]) -> Float[Array, "B H C"]:
    return jnp.sum(x * x, -1)


def _mean(x: Float[Array, "B H C"], content: Float[Array, "B 1 C"]) -> Float[Array, "B H"]:
    """Over tokens; zero if there is none."""
    return jnp.sum(x * content, -1) / jnp.maximum(jnp.sum(content, -1), 1)


def _square(weights: Weights) -> Float[Array, "B H"]:
    """Of the length of all of M."""
    return jnp.sum(jnp.stack([jnp.sum(m * m, (-2, -1)) for m in weights]), 0)
