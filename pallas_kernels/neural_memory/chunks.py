"""The work of a chunk of tokens: reads of the memory before it, and the step of gradient descent behind it.

A read of two matrices takes two products and a write five; `two_layers.py` has them.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._dispatch import has_reference_ops
from pallas_kernels._linear_state.products import product
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.neural_memory import two_layers

REACH = 4.0
"""Length that a memory may have, in lengths of a first matrix of entries of variance 1 / K."""

Weights = tuple[Float[Array, "B H _ _"], ...]
"""The weights of f: (M,) of x M, or (M1, M2) of x + silu(x M1) M2; one memory for each row and head."""


class MemoryState(NamedTuple):
    """A memory between two chunks.

    Attributes:
      weights: M, fp32 (f64 for f64).
      momentum: S, of the same shapes.
    """

    weights: Weights
    momentum: Weights


class Unsettled(NamedTuple):
    """A memory whose length has not been bounded yet.

    The next chunk bounds it. So the derivative of the bound needs the memory that enters a chunk, which the backward
    pass keeps, and not the one that leaves it, which it would have to make again.

    Attributes:
      state: M and S.
      square: of the length of M, where M changed since it was bounded, else zero. It has no derivative of its own.
    """

    state: MemoryState
    square: Float[Array, "B H"]


class Chunk(NamedTuple):
    """The C tokens of a chunk, zero at holes.

    Attributes:
      k, v: what is to be stored at which key.
      theta: step size of each token.
      eta, alpha: momentum and forgetting that each token asks for; the chunk's are their means over tokens.
      content: True for tokens; None if there is no hole.
    """

    k: Float[Array, "B H C K"]
    v: Float[Array, "B H C K"]
    theta: Float[Array, "B H C"]
    eta: Float[Array, "B H C"]
    alpha: Float[Array, "B H C"]
    content: Bool[Array, "B C"] | None


class Step(NamedTuple):
    """The demands of a chunk on the memory.

    Attributes:
      k, v: what is to be stored at which key.
      theta: step size of each token, zero at holes.
      eta, alpha: momentum and forgetting of the chunk.
      content: one for tokens, zero for holes; None if there is no hole.
      some: the memory is to change; None if all of them are. Where it is not, theta is zero.
    """

    k: Float[Array, "*N B H C K"]
    v: Float[Array, "*N B H C K"]
    theta: Float[Array, "*N B H C"]
    eta: Float[Array, "*N B H"]
    alpha: Float[Array, "*N B H"]
    content: Float[Array, "*N B 1 C"] | None
    some: Bool[Array, "*N B"] | None


class Trace(NamedTuple):
    """A trace of writes, without gradients. Per token it is zero except at the last of each chunk that was written.

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
    """Return einsum(equation, a, b) of operands of `dtype`, summed wide.

    Each index stands in the other operand or in the result.
    """
    if has_reference_ops():
        return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)
    return product(equation, a, b, dtype)


def read_memory(
    weights: Weights, q: Float[Array, "B H C K"], dtype: Any, scale: Float[Array, "B H"] | None = None
) -> Float[Array, "B H C K"]:
    """Return f_M(q), wide, or that of the weights times `scale`.

    Products take operands of `dtype`.
    """
    if len(weights) == 2:
        return two_layers.apply(weights, q, dtype, scale)
    found = multiply("bhck,bhkv->bhcv", q, weights[0], dtype)
    return found if scale is None else scale[..., None, None] * found


class Products(NamedTuple):
    """Other ways to compute what most products are in.

    Attributes:
      read: as `read_memory`, in `dtype` or wide.
      gradients: as `two_layers.gradients`.
    """

    read: Callable[..., Array]
    gradients: Callable[..., tuple[Weights, Array]]


PLAIN = Products(read_memory, two_layers.gradients)
"""The products by XLA."""


@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def write_memory(state: MemoryState, chunk: Chunk, dtype: Any) -> tuple[MemoryState, Trace]:
    """Return the memory behind a chunk; one without a token leaves it as it is.

    S' = eta S - G, M' = (1 - alpha) M + S', with G the gradient by M of sum_t theta_t l_t over
    max(1, sum_t theta_t L_t), where l_t = |f_M(k_t) - v_t|^2 / 2 and L_t = |grad l_t|^2 / (2 l_t). Both are then scaled
    by the same number, so that M' is no longer than `longest`.
    """
    written, surprise = update_memory(at_rest(state), gather(chunk), dtype)
    after = settle(written)
    return after, trace_of(after, surprise)


def gather(chunk: Chunk) -> Step:
    """Gather what an update needs of a chunk.

    Or of many chunks, whose arrays have more axes in front.
    """
    wide, content, some = accumulator(chunk.v.dtype), None, None
    theta, eta, alpha = (x.astype(wide) for x in (chunk.theta, chunk.eta, chunk.alpha))
    if chunk.content is not None:
        content, some = chunk.content[..., None, :].astype(wide), jnp.any(chunk.content, -1)
        theta = theta * content
    return Step(chunk.k, chunk.v, theta, _mean(eta, content), _mean(alpha, content), content, some)


def update_memory(
    memory: Unsettled, step: Step, dtype: Any, products: Products = PLAIN
) -> tuple[Unsettled, Float[Array, "B H"]]:
    """Return what `write_memory` makes, not scaled yet, and the mean loss.

    Scales and masks stand in numbers for each row and head: S' = c S - G, M' = a M + b S'. So M and S are read and
    written once, and no array of their size is selected from two.
    """
    kept = bound(memory)
    gradients, lost = _gradients(memory.state.weights, kept, step, dtype, products)
    of_weights, of_momentum = kept * (1 - step.alpha), kept * step.eta
    live: Any = 1
    if step.some is not None:
        some = step.some[:, None]
        of_weights, of_momentum = (jnp.where(some, x, 1) for x in (of_weights, of_momentum))
        live = some[..., None, None].astype(kept.dtype)
    of_weights, of_momentum = (x[..., None, None] for x in (of_weights, of_momentum))
    weights, momentum = memory.state
    momentum = tuple(of_momentum * s - g for s, g in zip(momentum, gradients, strict=True))
    weights = tuple(of_weights * m + live * s for m, s in zip(weights, momentum, strict=True))
    # Take the squares beside the pass that writes M: the next chunk would read M once more for them.
    square = square_of(weights) if has_reference_ops() else jax.lax.stop_gradient(square_of(weights))
    if step.some is not None:
        square = jnp.where(step.some[:, None], square, memory.square)
    return Unsettled(MemoryState(weights, momentum), square), _mean(lost / 2, step.content)


def at_rest(state: MemoryState) -> Unsettled:
    """Return a memory that `settle` leaves as it is."""
    return Unsettled(state, jnp.zeros_like(state.weights[0][:, :, 0, 0]))


def settle(memory: Unsettled) -> MemoryState:
    """Scale M and S by the same number, so that M is no longer than `longest`.

    They stay as they are if nothing was written.
    """
    kept = bound(memory)
    return MemoryState(*(scaled(x, kept) for x in memory.state))


def bound(memory: Unsettled) -> Float[Array, "B H"]:
    """Return what `settle` scales by."""
    square, *weights = vary_alike(memory.square, *memory.state.weights)
    if not has_reference_ops():
        square = _known_square(square, tuple(weights))
    return limit(square, weights[0].shape[-1])


def scaled(weights: Weights, scale: Float[Array, "B H"] | None) -> Weights:
    """Scale each row and head by a number of its own."""
    return weights if scale is None else tuple(scale[..., None, None] * x for x in weights)


def trace_of(state: MemoryState, surprise: Float[Array, "B H"]) -> Trace:
    """Return the trace of a write that left `state`."""
    lengths = (jnp.sqrt(square_of(x)) for x in state)
    return jax.tree.map(jax.lax.stop_gradient, Trace(surprise, *lengths))


def longest(hidden: int) -> float:
    """Return the length that a memory may have.

    It is `REACH` times that of a [K, hidden] matrix of entries of variance 1 / K.
    """
    return REACH * math.sqrt(hidden)


def limit(square: Float[Array, "B H"], hidden: int) -> Float[Array, "B H"]:
    """Return the scale that keeps a memory of that squared length no longer than `longest`."""
    most = longest(hidden)
    # Keep the root away from zero: its derivative there is infinite.
    return jnp.where(square > most**2, most * jax.lax.rsqrt(jnp.maximum(square, most**2)), 1)


@OwnGradient
def _known_square(square: Float[Array, "B H"], weights: Weights) -> Float[Array, "B H"]:
    """Return the known squared length of all of M, with the derivative by M."""
    del weights
    return square


def _known_square_fwd(square: Array, weights: Weights) -> tuple[Array, Any]:
    return square, weights


def _known_square_bwd(weights: Weights, g: Array) -> tuple[Array, Weights]:
    return jnp.zeros_like(g), scaled(weights, 2 * g)


_known_square.defvjp(_known_square_fwd, _known_square_bwd)


def _gradients(
    weights: Weights, kept: Float[Array, "B H"], step: Step, dtype: Any, products: Products
) -> tuple[Weights, Float[Array, "B H C"]]:
    """Return gradients of sum_t theta_t l_t / max(1, sum_t theta_t L_t) by `kept` M, and 2 l."""
    k, v, theta = step.k, step.v, step.theta
    if len(weights) == 2:
        return products.gradients(weights, k, v, theta, dtype, kept)
    error = read_memory(weights, k, dtype, kept) - v.astype(theta.dtype)
    curvature = _power(k.astype(theta.dtype))
    share = theta / jnp.maximum(jnp.sum(theta * curvature, -1, keepdims=True), 1)
    return (multiply("bhck,bhcv->bhkv", k, share[..., None] * error, dtype),), _power(error)


def _power(x: Float[Array, "B H C _"]) -> Float[Array, "B H C"]:
    return jnp.sum(x * x, -1)


def _mean(x: Float[Array, "*N B H C"], content: Float[Array, "*N B 1 C"] | None) -> Float[Array, "*N B H"]:
    """Return the mean over tokens; zero if there is none."""
    if content is None:
        return jnp.mean(x, -1)
    return jnp.sum(x * content, -1) / jnp.maximum(jnp.sum(content, -1), 1)


def square_of(weights: Weights) -> Float[Array, "B H"]:
    """Return the squared length of all of M."""
    return jnp.sum(jnp.stack([jnp.sum(m * m, (-2, -1)) for m in weights]), 0)
