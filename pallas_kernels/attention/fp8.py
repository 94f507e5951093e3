"""Causal attention of arrays in E4M3, and its gradients, by cuDNN on Hopper GPUs.

Each array has one scale, by which it was multiplied before it was rounded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat, _dispatch
from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0
"""The largest number of E4M3."""
WEIGHT_SCALE = 256.0
"""The scale of softmax weights, which are at most 1."""
WIDTH, MULTIPLE = 128, 128
"""Channels of a head, and of what a length is a multiple, where cuDNN has gradients."""
TOGETHER = 64
"""Heads of all rows in a call of cuDNN's backward pass. On an H200 it took 1.3 ms for each row of 8,192 tokens and 16
heads in a call of 4 rows, and 1.9 in a call of 6 (`step_kernels_fp8_attention.json`, ..._6_rows)."""


class Scales(NamedTuple):
    """Scales of queries, keys, values and the output."""

    q: Float[Array, ""]
    k: Float[Array, ""]
    v: Float[Array, ""]
    o: Float[Array, ""]


class GradientScales(NamedTuple):
    """Scales of the gradients of the output, the scores, queries, keys and values."""

    o: Float[Array, ""]
    scores: Float[Array, ""]
    q: Float[Array, ""]
    k: Float[Array, ""]
    v: Float[Array, ""]


class Output(NamedTuple):
    """The output in E4M3, its largest entry before rounding, without its scale, and the log-sum-exps of scores."""

    o: Float[Array, "B T H K"]
    largest: Float[Array, ""]
    lse: Float[Array, "B H T"]


class Gradients(NamedTuple):
    """Gradients in E4M3, and the largest entries of those of scores, queries, keys and values, without their scales."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H K"]
    largest: Float[Array, "4"]


def why_not(device: Device, q: Any, *_: Any) -> str | None:
    """Return why cuDNN cannot run this on `device`, or None."""
    if device.platform != "gpu" or device.capability is None or device.capability[0] != 9:
        return f"it needs a GPU of capability 9.x, this is {device.kind}"
    if q.shape[3] != WIDTH or q.shape[1] % MULTIPLE:
        return f"it takes heads of {WIDTH} channels and a length that divides by {MULTIPLE}, got {q.shape}"
    return None


def _reference(q: Array, k: Array, v: Array, scales: Scales) -> Output:
    """Compute it as defined: scores and sums in fp32, weights relative to a row's largest in E4M3."""
    scores, (_, _, values) = _scores(q, k, v, scales)
    top = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, -1)
    o = jnp.einsum("bhts,bshk->bthk", _rounded(weights, WEIGHT_SCALE), values, precision="highest")
    o = o / total.transpose(0, 2, 1)[..., None]
    return Output(_e4m3(o, scales.o), jnp.max(jnp.abs(o)), top[..., 0] + jnp.log(total))


def _reference_gradients(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    do: Array,
    scales: Scales,
    over: GradientScales,
) -> Gradients:
    """Compute them as defined; weights and the gradient of scores in E4M3."""
    scores, (queries, keys, values) = _scores(q, k, v, scales)
    above, out = _wide(do, over.o), _wide(o, scales.o)
    weights = jnp.exp(scores - lse[..., None])
    along = jnp.einsum("bthk,bshk->bhts", above, values, precision="highest")
    mean = jnp.sum(above * out, -1).transpose(0, 2, 1)[..., None]
    slope = weights * (along - mean) * q.shape[-1] ** -0.5
    rounded = _rounded(slope, over.scores)
    dq = jnp.einsum("bhts,bshk->bthk", rounded, keys, precision="highest")
    dk = jnp.einsum("bhts,bthk->bshk", rounded, queries, precision="highest")
    dv = jnp.einsum("bhts,bthk->bshk", _rounded(weights, WEIGHT_SCALE), above, precision="highest")
    largest = jnp.stack([jnp.max(jnp.abs(x)) for x in (slope, dq, dk, dv)])
    return Gradients(_e4m3(dq, over.q), _e4m3(dk, over.k), _e4m3(dv, over.v), largest)


def _scores(q: Array, k: Array, v: Array, scales: Scales) -> tuple[Array, tuple[Array, Array, Array]]:
    wide = _wide(q, scales.q), _wide(k, scales.k), _wide(v, scales.v)
    scores = jnp.einsum("bthk,bshk->bhts", wide[0], wide[1], precision="highest") * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.where(seen, scores, -jnp.inf), wide


def _wide(x: Array, scale: Any) -> Array:
    return x.astype(jnp.float32) / scale


def _e4m3(x: Array, scale: Any) -> Array:
    return jnp.clip(x * scale, -LARGEST, LARGEST).astype(E4M3)


def _rounded(x: Array, scale: Any) -> Array:
    return _wide(_e4m3(x, scale), scale)


def _cudnn(q: Array, k: Array, v: Array, scales: Scales) -> Output:
    return Output(*_compat.cudnn_attention_fp8(WEIGHT_SCALE, q, k, v, scales))


def _cudnn_gradients(*given: Any) -> Gradients:
    return in_parts(
        lambda *part: Gradients(*_compat.cudnn_attention_fp8_gradients(WEIGHT_SCALE, *part)), *given
    )


def in_parts(run: Callable[..., Gradients], *given: Any) -> Gradients:
    """Run gradients of `fp8_attention` for as many rows a call as have `TOGETHER` heads, and join them."""
    *arrays, scales, over = given
    rows, size = arrays[0].shape[0], max(TOGETHER // arrays[0].shape[2], 1)
    found = [run(*(x[i : i + size] for x in arrays), scales, over) for i in range(0, rows, size)]
    q, k, v, largest = zip(*found, strict=True)
    joined = jnp.concatenate(q), jnp.concatenate(k), jnp.concatenate(v)
    return Gradients(*joined, jnp.max(jnp.stack(largest), 0))


TABLE = (Implementation("cudnn", _cudnn, why_not), Implementation("reference", _reference))
GRADIENT_TABLE = (
    Implementation("cudnn", _cudnn_gradients, why_not),
    Implementation("reference", _reference_gradients),
)
"""Fastest first."""


@checked
def fp8_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    scales: Scales,
    *,
    implementation: str | None = None,
) -> Output:
    """Return causal softmax(q k^T / sqrt(K)) v of arrays in E4M3, in E4M3.

    Weights are rounded to E4M3 too, relative to a row's largest so far; scores and sums are fp32. It has no
    derivative of its own: see `fp8_attention_gradients`.

    Args:
      q: queries, multiplied by `scales.q`.
      k: keys, multiplied by `scales.k`.
      v: values, multiplied by `scales.v`.
      scales: of these, and what the output is multiplied by before it is rounded; what exceeds 448 becomes 448.
      implementation: "cudnn" (Hopper GPUs, heads of 128 channels, lengths that divide by 128), "reference", or None.

    Raises:
      ValueError: shapes or dtypes do not fit, or the implementation cannot run this here.

    Source: FlashAttention-3 (2407.08608, section 3.3) for the forward pass; FP8 formats (2209.05433).
    """
    _check(q, k, v)
    device = _dispatch.current_device()
    return _dispatch.choose("fp8_attention", TABLE, implementation, device, q, k, v).run(q, k, v, scales)


@checked
def fp8_attention_gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    o: Float[Array, "B T H K"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H K"],
    scales: Scales,
    over: GradientScales,
    *,
    implementation: str | None = None,
) -> Gradients:
    """Return the gradients of `fp8_attention` in E4M3: p = exp(s - lse), ds = p (do.v - do.o) / sqrt(K).

    dv = p^T do, dq = ds k and dk = ds^T q, where p and ds are rounded to E4M3.

    Args:
      q: queries, as `fp8_attention` took them.
      k: keys, likewise.
      v: values, likewise.
      o: its output.
      lse: its log-sum-exps.
      do: the gradient of the output in E4M3, multiplied by `over.o`.
      scales: those of the forward pass.
      over: the scale of do, and what ds and the gradients are multiplied by before they are rounded.
      implementation: as for `fp8_attention`.

    Raises:
      ValueError: shapes or dtypes do not fit, or the implementation cannot run this here.
    """
    _check(q, k, v, o, do)
    device, given = _dispatch.current_device(), (q, k, v, o, lse, do)
    chosen = _dispatch.choose("fp8_attention_gradients", GRADIENT_TABLE, implementation, device, *given)
    return chosen.run(*given, scales, over)


def _check(*arrays: Array) -> None:
    if len({x.shape for x in arrays}) > 1 or any(x.dtype != E4M3 for x in arrays):
        told = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        raise ValueError(f"fp8_attention: arrays must be float8_e4m3fn of one shape [B, T, H, K], got {told}")
