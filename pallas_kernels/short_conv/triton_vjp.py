"""Gradients of the Triton form: one more pass over memory, and each program's part of the weights' sums.

No atomics: XLA adds up the programs' parts of a channel, so that gradients repeat bit for bit.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import only_tokens
from pallas_kernels.short_conv.triton_call import (
    call_over_rows,
    join_groups,
    pairs_of,
    split_groups,
    tiles_of,
)
from pallas_kernels.short_conv.xla import short_conv_xla

PAIRS = 1024
"""Pairs of steps per program, fewer in short rows; a power of two."""

FEWER_PAIRS = 512
"""The same where rows have gates, which take registers."""

WARPS = 4
"""Warps of a program."""


def gradients(
    x: Float[Array, "B D T"],
    weights: Float[Array, "D K"],
    pre_gate: Float[Array, "B D T"] | None,
    post_gate: Float[Array, "B D T"] | None,
    history: Float[Array, "B D K-1"] | None,
    segment_ids: Int[Array, "B T"] | None,
    dy: Float[Array, "B D T"],
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    """Return gradients of x, weights, pre_gate, post_gate and history.

    dy is that of `short_conv`'s result.
    """
    arrays = (x, weights, pre_gate, post_gate, history, segment_ids, dy)
    found = _groups(*(None if z is None else z[None] for z in arrays))
    dx, dweights, dpre, dpost = vary_alike(*(None if z is None else z[0] for z in found), x)[:-1]
    if history is None:
        return dx, dweights, dpre, dpost, None
    more, dhistory = _through_history(weights, post_gate, history, segment_ids, dy)
    return dx, dweights + more, dpre, dpost, dhistory


def _through_history(
    weights: Array, post_gate: Array | None, history: Array, segment_ids: Array | None, dy: Array
) -> tuple[Array, Array]:
    """Return what history adds to the gradient of the weights, and its own.

    Both come from the first K - 1 steps only.
    """
    first = slice(history.shape[-1])
    nothing = jnp.zeros_like(dy[..., first])
    ids, post_gate = (None if z is None else z[..., first] for z in (segment_ids, post_gate))

    def run(weights: Array, history: Array) -> Array:
        return short_conv_xla(nothing, weights, segment_ids=ids, history=history, post_gate=post_gate)

    return jax.vjp(run, weights, history)[1](only_tokens(dy[..., first], ids))


@jax.custom_batching.custom_vmap
def _groups(
    x: Float[Array, "G B D T"],
    weights: Float[Array, "G D K"],
    pre_gate: Float[Array, "G B D T"] | None,
    post_gate: Float[Array, "G B D T"] | None,
    history: Float[Array, "G B D K-1"] | None,
    segment_ids: Int[Array, "G B T"] | None,
    dy: Float[Array, "G B D T"],
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return gradients of x, weights, pre_gate and post_gate, of G calls.

    Each call has weights of its own.
    """
    from pallas_kernels.short_conv.triton_kernel import short_conv_vjp

    pairs = pairs_of(x.shape[3], PAIRS if pre_gate is None and post_gate is None else FEWER_PAIRS)
    parts = (*weights.shape, x.shape[1] * tiles_of(x.shape[3], pairs))
    dx, sums, dpre, dpost = call_over_rows(
        short_conv_vjp,
        (x, weights, pre_gate, post_gate, history, segment_ids),
        dy,
        out_shape=(_like(x), jax.ShapeDtypeStruct(parts, weights.dtype), _like(pre_gate), _like(post_gate)),
        pairs=pairs,
        warps=WARPS,
    )
    return dx, sums.sum(-1), None if pre_gate is None else dpre, None if post_gate is None else dpost


def _like(stream: Array | None) -> jax.ShapeDtypeStruct:
    """Return the type of a stream's gradient.

    For a stream that is not there it is an element that nothing is written to.
    """
    if stream is None:
        return jax.ShapeDtypeStruct((1,), jnp.float32)
    return jax.ShapeDtypeStruct(stream.shape, stream.dtype)


@_groups.def_vmap
def _more_groups(size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
    found = jax.tree.map(partial(split_groups, size), _groups(*join_groups(size, batched, arrays)))
    return found, jax.tree.map(lambda _: True, found)
