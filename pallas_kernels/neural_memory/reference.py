"""The definition: one token after another, and `jax.grad` of what a token loses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.tokens import count_documents, only_tokens
from pallas_kernels.neural_memory.chunks import MemoryState, Trace, longest
from pallas_kernels.neural_memory.two_layers import EPSILON

HIGHEST = lax.Precision.HIGHEST


def neural_memory_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    theta: Float[Array, "B T H"],
    eta: Float[Array, "B T H"],
    alpha: Float[Array, "B T H"],
    weights: tuple[Float[Array, "H _ _"], ...],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    initial_state: MemoryState | None = None,
    output_final_state: bool = False,
    output_trace: bool = False,
    chunk_size: int = 512,
) -> Any:
    """Compute `neural_memory` by its definition.

    It has derivatives of any order, forward mode too.
    """
    wide, ids = accumulator(v.dtype), segment_ids
    if ids is None:
        ids = jnp.ones(v.shape[:2], jnp.int32)
    streams = [only_tokens(x, segment_ids).astype(wide) for x in (q, k, v, theta, eta, alpha)]
    begins = jnp.diff(count_documents(ids), axis=1, prepend=0) > 0
    start = jax.tree.map(lambda m: m.astype(wide), tuple(weights))
    state = initial_state
    if state is None:
        rows = tuple(jnp.broadcast_to(m, (v.shape[0], *m.shape)) for m in start)
        state = MemoryState(rows, jax.tree.map(jnp.zeros_like, rows))
    flat, tree = jax.tree.flatten((streams, ids, begins, start, state))
    streams, ids, begins, start, state = jax.tree.unflatten(tree, vary_alike(*flat))

    def head(streams: Any, ids: Array, begins: Array, start: Any, state: Any) -> Any:
        return _one_head(streams, (ids > 0, ids != 0, begins), start, state, chunk_size)

    heads = jax.vmap(head, in_axes=(1, None, None, 0, 0), out_axes=((1, 1), 0))
    (y, trace), final = jax.vmap(heads, in_axes=(0, 0, 0, None, 0))(streams, ids, begins, start, state)
    found: list[Any] = [y.astype(v.dtype)]
    found += [final] if output_final_state else []
    found += [trace] if output_trace else []
    return tuple(found) if len(found) > 1 else found[0]


def _one_head(streams: Any, marks: Any, start: Any, state: Any, chunk_size: int) -> Any:
    """Run streams [T, K] and [T] of one head.

    What is summed up over a chunk is the loss's gradient and four numbers.
    """
    zeros = jax.tree.map(jnp.zeros_like, start)
    nothing = (zeros, *(jnp.zeros_like(streams[3][0]) for _ in range(5)))
    fresh = (MemoryState(start, zeros), nothing, jnp.int32(0))

    def step(carry: Any, token: Any) -> Any:
        (q, k, v, theta, eta, alpha), (content, live, begins) = token
        (memory, momentum), sums, time = jax.tree.map(lambda a, b: jnp.where(begins, a, b), fresh, carry)
        loss, gradient = jax.value_and_grad(_loss)(memory, k, v)
        one = content.astype(theta.dtype)
        curved = theta * _curvature(memory, k, loss, gradient)
        added = (*(curved, eta, alpha, one), loss * one)
        gradients = jax.tree.map(lambda s, g: s + theta * g, sums[0], gradient)
        sums = (gradients, *(s + a for s, a in zip(sums[1:], added, strict=True)))
        time, y = time + live.astype(jnp.int32), _read(memory, q)
        ends, before = (time == chunk_size) & live, MemoryState(memory, momentum)
        written = ends & (sums[4] > 0)
        state = jax.tree.map(lambda a, b: jnp.where(written, a, b), _write(before, sums), before)
        trace = jax.tree.map(lambda x: jnp.where(written, lax.stop_gradient(x), 0), _trace(state, sums))
        sums = jax.tree.map(lambda s: jnp.where(ends, 0, s), sums)
        return (state, sums, jnp.where(ends, 0, time)), (y, trace)

    carry = (state, *fresh[1:])
    flat, tree = jax.tree.flatten(carry)
    carry = jax.tree.unflatten(tree, vary_alike(*flat, streams[0])[:-1])
    (final, _, _), found = lax.scan(step, carry, (streams, marks))
    return found, final


def _read(memory: Any, x: Float[Array, "K"]) -> Float[Array, "K"]:
    if len(memory) == 1:
        return jnp.matmul(x, memory[0], precision=HIGHEST)
    hidden = jax.nn.silu(jnp.matmul(x, memory[0], precision=HIGHEST))
    return x + jnp.matmul(hidden, memory[1], precision=HIGHEST)


def _loss(memory: Any, k: Float[Array, "K"], v: Float[Array, "K"]) -> Float[Array, ""]:
    return jnp.sum(jnp.square(_read(memory, k) - v)) / 2


def _curvature(memory: Any, k: Float[Array, "K"], loss: Array, gradient: Any) -> Float[Array, ""]:
    """Return |grad loss|^2 / (2 loss).

    The part of the last matrix is the square of what it multiplies.
    """
    if len(memory) == 1:
        return jnp.sum(k * k)
    hidden = jax.nn.silu(jnp.matmul(k, memory[0], precision=HIGHEST))
    return jnp.sum(hidden**2) + jnp.sum(gradient[0] ** 2) / (2 * loss + EPSILON)


def _write(state: MemoryState, sums: Any) -> MemoryState:
    """Return the memory behind a chunk of which these are the sums."""
    gradient, curved, eta, alpha, count, _ = sums
    some = jnp.maximum(count, 1)
    momentum = jax.tree.map(
        lambda s, g: eta / some * s - g / jnp.maximum(curved, 1), state.momentum, gradient
    )
    memory = jax.tree.map(lambda m, s: (1 - alpha / some) * m + s, state.weights, momentum)
    square, most = sum(jnp.sum(m * m) for m in memory), longest(memory[0].shape[-1])
    kept = most / jnp.sqrt(jnp.maximum(square, most**2))
    return MemoryState(*jax.tree.map(lambda x: kept * x, (memory, momentum)))


def _trace(state: MemoryState, sums: Any) -> Trace:
    *_, count, loss = sums
    lengths = (jnp.sqrt(sum(jnp.sum(m * m) for m in x)) for x in jax.tree.map(lax.stop_gradient, state))
    return Trace(loss / jnp.maximum(count, 1), *lengths)
