"""Steps of every convolution op around its convolution: gates, tokens against holes, checks of arguments."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient


def accumulator(dtype: Any) -> Any:
    """Return the dtype that sums are kept in: fp32, or the dtype itself if that is wider."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def only_tokens(x: Float[Array, "B D T"], segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B D T"]:
    """Zero x, in value and in gradient, at holes and padding, whatever lies there."""
    return x if segment_ids is None else jnp.where(segment_ids[:, None] > 0, x, jnp.zeros((), x.dtype))


@partial(OwnGradient, nondiff_argnums=(2, 3))
def _product(a: Array, b: Array, a_dtype: Any, dtype: Any) -> Array:
    wide = accumulator(dtype)
    return (a.astype(wide) * b.astype(wide)).astype(dtype)


def _product_fwd(a: Array, b: Array, a_dtype: Any, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return _product(a, b, a_dtype, dtype), (a.astype(b.dtype), b)


def _product_bwd(a_dtype: Any, dtype: Any, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    a, b = residuals
    wide = accumulator(dtype)
    g = g.astype(wide)
    return (g * b.astype(wide)).astype(a_dtype), (g * a.astype(wide)).astype(b.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def gate(a: Float[Array, "B D T"], b: Float[Array, "B D T"], dtype: Any) -> Float[Array, "B D T"]:
    """Return a * b, computed wide, as `dtype`.

    What backward needs of `a` is kept in b's dtype, not in a's.
    """
    a, b = vary_alike(a, b)
    return _product(a, b, a.dtype, dtype)


def enter(
    x: Float[Array, "B D T"],
    pre_gate: Float[Array, "B D T"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B D T"]:
    """Return u = pre_gate * x, zero where there is no token, in x's dtype."""
    x = only_tokens(x, segment_ids)
    return x if pre_gate is None else gate(only_tokens(pre_gate, segment_ids), x, x.dtype)


def leave(
    y: Float[Array, "B D T"],
    post_gate: Float[Array, "B D T"] | None,
    segment_ids: Int[Array, "B T"] | None,
    dtype: Any,
) -> Float[Array, "B D T"]:
    """Return post_gate * y as `dtype`, zero where there is no token.

    The cotangent there has no effect either.
    """
    if post_gate is not None:
        y = gate(y, only_tokens(post_gate, segment_ids), dtype)
    return only_tokens(y, segment_ids).astype(dtype)


def add_skip(filter: Float[Array, "D F"], bias: Float[Array, "D"] | None, centre: int) -> Float[Array, "D F"]:
    """Add the skip connection to the filter: bias * u is a tap at lag 0, index `centre`."""
    return filter if bias is None else filter.at[:, centre].add(bias.astype(filter.dtype))


def check_streams(
    op: str,
    x: Any,
    segment_ids: Any = None,
    bias: Any = None,
    pre_gate: Any = None,
    post_gate: Any = None,
) -> None:
    """Raise ValueError for streams that are not [B, D, T] or do not fit x.

    Ids must be integers.
    """
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"{op}: x must be [batch, channels, time], each at least 1, got shape {x.shape}")
    check_floats(op, x=x, bias=bias, pre_gate=pre_gate, post_gate=post_gate)
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{op}: segment_ids must be integers, got {segment_ids.dtype}: cast them first")
    batch, channels, length = x.shape
    expected = {
        "segment_ids": (segment_ids, (batch, length)),
        "bias": (bias, (channels,)),
        "pre_gate": (pre_gate, x.shape),
        "post_gate": (post_gate, x.shape),
    }
    for name, (array, shape) in expected.items():
        check_shape(op, name, array, shape)


def check_floats(op: str, **arrays: Any) -> None:
    """Raise ValueError for an array that is given and is not floating point."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} must be floating point, got {array.dtype}: cast it first")


def check_shape(op: str, name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError if an argument is given and has another shape."""
    if array is not None and array.shape != shape:
        raise ValueError(
            f"{op}: {name} must have shape {shape} (streams are channel-major), got {array.shape}"
        )


def check_filter(op: str, x: Any, filter: Any, causal: bool) -> None:
    """Raise ValueError for a filter that is not [D, L] or [D, 2L - 1] in floats.

    A causal one has L taps, a bidirectional one 2L - 1.
    """
    check_floats(op, filter=filter)
    if filter.ndim != 2 or filter.shape[0] != x.shape[1] or filter.shape[1] < 1:
        raise ValueError(f"{op}: filter must be [{x.shape[1]} channels, taps], got shape {filter.shape}")
    if not causal and filter.shape[1] % 2 == 0:
        raise ValueError(
            f"{op}: a bidirectional filter has 2L - 1 taps, lag 0 in the middle; got {filter.shape[1]}, an even number"
        )


def check_alignment(op: str, segment_alignment: int) -> None:
    """Raise ValueError for an alignment that is no grid."""
    if segment_alignment < 1:
        raise ValueError(
            f"{op}: segment_alignment is the grid on which documents start, at least 1, got {segment_alignment}"
        )
