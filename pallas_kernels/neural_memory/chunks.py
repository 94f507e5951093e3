"""What a chunk of tokens does: reads of the memory before it, and the step of gradient descent behind it.

The gradient is written out: with `Linear` layers f = x + silu(x M1) M2 it takes five products, and a read takes two.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._dispatch import has_reference_ops
from pallas_kernels._linear_state.products import product

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

    S' = eta S - G, M' = (1 - alpha) M + S', with G the gradient by M of sum_t theta_t |f_M(k_t) - v_t|^2 / 2, over
    max(1, sum_t theta_t).
    """
    wide, count = state.weights[0].dtype, jnp.sum(chunk.content, 1, dtype=jnp.int32)
    content = chunk.content[:, None].astype(wide)
    eta, alpha = (_mean(x.astype(wide), content)[..., None, None] for x in (chunk.eta, chunk.alpha))
    theta = chunk.theta.astype(wide) * content
    share = theta / jnp.maximum(jnp.sum(theta, -1, keepdims=True), 1)
    gradients, error = _gradients(state.weights, chunk, share, dtype)
    some = (count > 0).reshape(-1, 1, 1, 1)
    momentum = tuple(jnp.where(some, eta * s - g, s) for s, g in zip(state.momentum, gradients, strict=True))
    weights = tuple(
        jnp.where(some, (1 - alpha) * m + s, m) for m, s in zip(state.weights, momentum, strict=True)
    )
    lost = _mean(jnp.sum(error * error, -1) / 2, content)
    trace = Trace(lost, *(_length(x) for x in (weights, momentum)))
    return MemoryState(weights, momentum), jax.tree.map(jax.lax.stop_gradient, trace)


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
    weights: Weights, chunk: Chunk, share: Float[Array, "B H C"], dtype: Any
) -> tuple[Weights, Float[Array, "B H C K"]]:
    """Of sum_t share_t |f_M(k_t) - v_t|^2 / 2 by M, and f_M(k) - v."""
    found, hidden = _apply(weights, chunk.k, dtype)
    error = found - chunk.v.astype(found.dtype)
    scaled = share[..., None] * error
    if hidden is None:
        return (multiply("bhck,bhcv->bhkv", chunk.k, scaled, dtype),), error
    gate = jax.nn.sigmoid(hidden)
    second = multiply("bhce,bhck->bhek", hidden * gate, scaled, dtype)
    back = multiply("bhck,bhek->bhce", scaled, weights[1], dtype)
    slope = gate * (1 + hidden * (1 - gate))
    return (multiply("bhck,bhce->bhke", chunk.k, back * slope, dtype), second), error


def _mean(x: Float[Array, "B H C"], content: Float[Array, "B 1 C"]) -> Float[Array, "B H"]:
    """Over tokens; zero if there is none."""
    return jnp.sum(x * content, -1) / jnp.maximum(jnp.sum(content, -1), 1)


def _length(weights: Weights) -> Float[Array, "B H"]:
    return jnp.sqrt(sum(jnp.sum(jnp.square(m), (-2, -1)) for m in weights))
