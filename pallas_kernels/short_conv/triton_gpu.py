"""Any NVIDIA GPU since Ampere: one pass over memory in Triton's language, called through jax-triton.

A program takes some steps of one row. Steps are loaded in pairs, so that a lag of two is the pair before and a lag of
one the other half of a pair: K taps ask for K // 2 + 1 pairs, and bf16 is read in words of 32 bits. All but the first
of these loads find their bytes in the L1 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import current_device
from pallas_kernels.short_conv.gates import accumulator, add_skip
from pallas_kernels.short_conv.xla import short_conv_xla

PAIRS = 1024
"""Pairs of steps per program, fewer in short rows; a power of two. The README has times of others."""


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
    """See `short_conv`; what `triton_why.why_not` refuses is not looked at again."""
    weights = add_skip(taps.astype(accumulator(x.dtype)), bias, 0)
    if taps.shape[1] == 1:
        history = None
    return _conv(*vary_alike(x, weights, pre_gate, post_gate, history, segment_ids))


@jax.custom_vjp
def _conv(x: Array, weights: Array, *others: Array | None) -> Array:
    one_group = (None if z is None else z[None] for z in (x, weights, *others))
    y = _groups(*one_group)[0]
    return vary_alike(y, x)[0]


def _forward(x: Array, weights: Array, *others: Array | None) -> tuple[Array, tuple[Any, ...]]:
    return _conv(x, weights, *others), (x, weights, *others)


def _backward(residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    """That of the XLA form."""
    *streams, segment_ids = residuals

    def run(x: Array, taps: Array, pre: Array | None, post: Array | None, history: Array | None) -> Array:
        return short_conv_xla(x, taps, segment_ids=segment_ids, history=history, pre_gate=pre, post_gate=post)

    return *jax.vjp(run, *streams)[1](g), None


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
    """G calls with weights of their own; what is absent is not read, and x stands in its place."""
    import jax_triton

    from pallas_kernels.short_conv.triton_kernel import kernel

    _, batch, channels, length = x.shape
    pairs = min(PAIRS, 1 << (-(-length // 2) - 1).bit_length())
    major, minor = current_device().capability or (8, 0)
    optional = (pre_gate, post_gate, history, segment_ids)
    return jax_triton.triton_call(
        *(x, weights, *(x if z is None else z for z in optional)),
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // length * -(-length // (2 * pairs)),),
        name="short_conv",
        compute_capability=10 * major + minor,
        BATCH=batch,
        CHANNELS=channels,
        LENGTH=length,
        TAPS=weights.shape[-1],
        PAIRS=pairs,
        PRE=pre_gate is not None,
        POST=post_gate is not None,
        HISTORY=history is not None,
        PACKED=segment_ids is not None,
    )


@_groups.def_vmap
def _more_groups(size: int, batched: Any, *arrays: Any) -> tuple[Array, bool]:
    def merge(z: Array, is_batched: bool) -> Array:
        z = z if is_batched else jnp.broadcast_to(z, (size, *z.shape))
        return z.reshape(-1, *z.shape[2:])

    y = _groups(*(None if z is None else merge(z, b) for z, b in zip(arrays, batched, strict=True)))
    return y.reshape(size, -1, *y.shape[1:]), True
