"""Any NVIDIA GPU since Ampere: one pass over memory in Triton's language, called through jax-triton.

A program takes some steps of one row. Steps are loaded in pairs. A lag of two is then the pair before, and a lag of one
the other half of a pair. K taps ask for K // 2 + 1 pairs, and bf16 is read in words of 32 bits. All but the first of
these loads find their bytes in the L1 cache.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator, add_skip
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.short_conv.triton_call import call_over_rows, join_groups, pairs_of, split_groups
from pallas_kernels.short_conv.triton_vjp import gradients

PAIRS = 1024
"""Pairs of steps per program, fewer in short rows; a power of two. The README has times of others."""

WARPS = 4
"""Warps of a program."""


def short_conv_triton(
    x: Float[Array, "B D T"],
    taps: Float[Array, "D K"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    history: Float[Array, "B D K-1"] | None = None,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
) -> Float[Array, "B D T"]:
    """Compute `short_conv`; what `triton_why.why_not` refuses is not checked again."""
    weights = add_skip(taps.astype(accumulator(x.dtype)), bias, 0)
    if taps.shape[1] == 1:
        history = None
    return _conv(*vary_alike(x, weights, pre_gate, post_gate, history, segment_ids))


@OwnGradient
def _conv(x: Array, weights: Array, *others: Array | None) -> Array:
    one_group = (None if z is None else z[None] for z in (x, weights, *others))
    y = _groups(*one_group)[0]
    return vary_alike(y, x)[0]


def _forward(x: Array, weights: Array, *others: Array | None) -> tuple[Array, tuple[Any, ...]]:
    return _conv(x, weights, *others), (x, weights, *others)


def _backward(residuals: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    return *gradients(*residuals, dy=dy), None


_conv.defvjp(_forward, _backward)


@jax.custom_batching.custom_vmap
def _groups(
    x: Float[Array, "G B D T"],
    weights: Float[Array, "G D K"],
    pre_gate: Float[Array, "G B D T"] | None,
    post_gate: Float[Array, "G B D T"] | None,
    history: Float[Array, "G B D K-1"] | None,
    segment_ids: Int[Array, "G B T"] | None,
) -> Float[Array, "G B D T"]:
    """Compute G calls with weights of their own."""
    from pallas_kernels.short_conv.triton_kernel import short_conv

    arrays = (x, weights, pre_gate, post_gate, history, segment_ids)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    pairs = pairs_of(x.shape[3], PAIRS)
    return call_over_rows(short_conv, arrays, out_shape=out, pairs=pairs, warps=WARPS)


@_groups.def_vmap
def _more_groups(size: int, batched: Any, *arrays: Any) -> tuple[Array, bool]:
    return split_groups(size, _groups(*join_groups(size, batched, arrays))), True
