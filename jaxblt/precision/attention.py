"""Causal attention whose operands are FP8, forward and backward."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.parallel.attention.plan import Plan
from jaxblt.precision.formats import E4M3, scale_for
from jaxblt.precision.products import Operand, round_once
from pallas_kernels.attention import (
    Fp8GradientScales,
    Fp8Scales,
    fp8_attention,
    fp8_attention_gradients,
)
from pallas_kernels.attention.fp8 import MULTIPLE, WIDTH
from pallas_kernels.runtime import OwnGradient, current_device

CAPABILITY = 9
"""Of GPUs that attend in FP8: the definition would hold all scores of a row on others."""


class AttentionPast(NamedTuple):
    """Largest entries of the last steps, newest first: of queries, keys, values, the output, and of gradients.

    The gradients are those of the output, the scores, queries, keys and values. As in `Past`, the cotangent of each has
    this step's entry in its first place.
    """

    q: Float[Array, "H"]
    k: Float[Array, "H"]
    v: Float[Array, "H"]
    o: Float[Array, "H"]
    do: Float[Array, "H"]
    scores: Float[Array, "H"]
    dq: Float[Array, "H"]
    dk: Float[Array, "H"]
    dv: Float[Array, "H"]


def why_not(plan: Plan, q: Any, k: Any, hides: Any, slopes: Any, times: Any) -> str | None:
    """Return why a call without a state cannot attend in FP8, or None."""
    device = current_device()
    if device.platform == "gpu" and (device.capability or (0,))[0] != CAPABILITY:
        return f"it takes a GPU of capability {CAPABILITY}.x, and this is {device.kind}"
    if plan.route != "whole" or not plan.causal or plan.window is not None or plan.rule is not None:
        return "it takes whole causal rows on one device, without window and rule"
    if hides is not None or slopes is not None or times is not None:
        return "it takes rows of one document without holes, and no ALiBi"
    if plan.scale is not None or plan.implementation is not None:
        return "it has a scale and an implementation of its own"
    if jax.sharding.get_abstract_mesh().size > 1:
        return f"it runs on one device, and the mesh has {jax.sharding.get_abstract_mesh().size}"
    if q.shape != k.shape or q.shape[3] != WIDTH or q.shape[1] % MULTIPLE or q.dtype != jnp.bfloat16:
        return (
            f"it takes bfloat16, as many heads of keys as of queries, {WIDTH} channels each, and a length that divides "
            f"by {MULTIPLE}: got queries {q.dtype}{list(q.shape)} and keys {list(k.shape)}"
        )
    return None


def attend_in_fp8(
    past: AttentionPast,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    margin: int = 0,
) -> Float[Array, "B T H K"]:
    """Return causal softmax(q k^T / sqrt(K)) v in the dtype of q, all operands and gradients in E4M3.

    Scales are powers of two, chosen by the largest entries of the steps before; see `pallas_kernels.attention`. An
    operand that is not finite makes the output NaN.
    """
    return _attend(margin, past, q, k, v)


@partial(OwnGradient, nondiff_argnums=(0,))
def _attend(margin: int, past: AttentionPast, q: Array, k: Array, v: Array) -> Array:
    return _forward(margin, past, q, k, v)[0]


def _forward(margin: int, past: AttentionPast, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    q8, k8, v8 = (round_once(x, before, margin) for x, before in zip((q, k, v), past[:3], strict=True))
    scales = Fp8Scales(q8.scale, k8.scale, v8.scale, scale_for(jnp.max(past.o), E4M3, margin))
    found = fp8_attention(q8.value, k8.value, v8.value, scales)
    largest = (q8.largest, k8.largest, v8.largest, found.largest)
    o = _wide(found.o, scales.o, largest, q.dtype)
    return o, (past, (q8.value, k8.value, v8.value), scales, found.o, found.lse, largest)


def _backward(margin: int, kept: Any, do: Array) -> tuple[AttentionPast, Array, Array, Array]:
    past, (q, k, v), scales, o, lse, largest = kept
    above: Operand = round_once(do, past.do, margin)
    own = (scale_for(jnp.max(before), E4M3, margin) for before in past[5:])
    over = Fp8GradientScales(above.scale, *own)
    found = fp8_attention_gradients(q, k, v, o, lse, above.value, scales, over)
    seen = (*largest, above.largest, *found.largest)
    history = AttentionPast(
        *(jnp.zeros_like(h).at[0].set(entry) for h, entry in zip(past, seen, strict=True))
    )
    dq, dk, dv = (_wide(x, s, seen, do.dtype) for x, s in zip(found[:3], over[2:], strict=True))
    # Else XLA converts in the pass that turns heads and finds their largest entry, which is three times as slow
    dq, dk = jax.lax.optimization_barrier((dq, dk))
    return history, dq, dk, dv


def _wide(x: Array, scale: Array, seen: tuple[Array, ...], dtype: Any) -> Array:
    """Undo a scale; NaN if an entry that was seen is not finite, as clipped entries would hide that."""
    finite = jnp.all(jnp.isfinite(jnp.stack(seen)))
    return x.astype(dtype) * jnp.where(finite, 1 / scale, jnp.nan).astype(dtype)


_attend.defvjp(_forward, _backward)
