"""Hopper: the forward kernel (`mosaic_gpu_forward`) between arrays of the op; gradients are those of `xla`.

A document is a gate of zero at its first step. Gates reach the kernel in units of log 2, cut where nothing is left in
fp32. Values wider than a program's are heads that share their keys.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._linear_state.tokens import count_documents, only_tokens
from pallas_kernels.gated_linear_attention.hopper import PIECE
from pallas_kernels.gated_linear_attention.mosaic_gpu_forward import forward
from pallas_kernels.gated_linear_attention.mosaic_gpu_tiles import Call, Gate
from pallas_kernels.gated_linear_attention.xla import gated_linear_attention_xla

LEAST = -192.0
"""Where gates are cut, in units of log 2: 2^-192 is 0 in fp32."""

GATES: dict[str, Gate] = {"log_gate": "head", "log_key_gate": "key", "log_value_gate": "value"}


def gated_linear_attention_mosaic_gpu(
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    log_key_gate: Float[Array, "B T J K"] | None = None,
    log_value_gate: Float[Array, "B T H V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    chunk_size: int = 64,
    interpret: Any = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """See `gated_linear_attention`; what `hopper.why_not` refuses is not looked at again, and chunks are of 64.

    Args:
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    gates = {"log_gate": log_gate, "log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    given = [name for name, gate in gates.items() if gate is not None]
    name = given[0] if given else "log_gate"
    gate = gates[name] if given else jnp.zeros(v.shape[:3], jnp.float32)
    state = initial_state
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    arrays = vary_alike(q, k, v, gate, state)
    found: Any = _attend(*arrays, segment_ids, name, float(scale), interpret)
    return found if output_final_state else found[0]


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    gate: Array,
    state: Array,
    ids: Int[Array, "B T"] | None,
    name: str,
    scale: float,
    interpret: Any,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    q, k, v, gate = (only_tokens(x, ids) for x in (q, k, v, gate))
    log2 = jnp.maximum(gate.astype(jnp.float32) * math.log2(math.e), LEAST)
    if ids is not None:
        begins = jnp.diff(count_documents(ids), axis=1, prepend=0) > 0
        log2 = jnp.where(begins.reshape(*begins.shape, *(1,) * (gate.ndim - 2)), LEAST, log2)
    return _call(q, k, v, log2, state.astype(jnp.float32), GATES[name], scale, interpret)


def _attend_fwd(*args: Any) -> tuple[Any, tuple[Any, ...]]:
    return _attend(*args), args[:6]


def _attend_bwd(name: str, scale: float, interpret: Any, kept: tuple[Any, ...], cotangents: Any) -> Any:
    *arrays, ids = kept

    def run(q: Array, k: Array, v: Array, gate: Array, state: Array) -> Any:
        options = {"segment_ids": ids, "initial_state": state, "output_final_state": True, "scale": scale}
        return gated_linear_attention_xla(q, k, v, **{name: gate}, **options)

    return *jax.vjp(run, *arrays)[1](cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _call(
    q: Array, k: Array, v: Array, log2: Array, state: Array, gate: Gate, scale: float, interpret: Any
) -> tuple[Array, Array]:
    """The kernel on heads of values that are as wide as it takes."""
    (batch, length, heads, values), keys = v.shape, k.shape[3]
    # Two warpgroups share what they make of key channels only if each has 64 of them.
    width = 2 * PIECE if values % (2 * PIECE) == 0 and (gate != "key" or keys == 2 * PIECE) else PIECE
    parts = values // width
    call = Call(
        gate=gate,
        chunks=-(-length // PIECE),
        ratio=heads * parts // k.shape[2],
        keys=keys // PIECE,
        workers=width // PIECE,
        scale=scale,
        simulated=interpret is not None,
    )
    states = state.reshape(batch, heads, keys, parts, width)
    states = jnp.moveaxis(states, 3, 2).reshape(batch, heads * parts, keys, width)
    gates = sums_of_heads(log2, parts) if gate == "head" else halves_of_gates(log2)
    streams = vary_alike(_matrix(q), _matrix(k), _matrix(v), *gates, states)
    o, final = forward(streams, call, heads * parts, interpret)
    final = jnp.moveaxis(final.reshape(batch, heads, parts, keys, width), 2, 3)
    return o[:, :length].reshape(v.shape), final.reshape(state.shape)


def sums_of_heads(log2: Float[Array, "B T H"], parts: int) -> tuple[Array, Array]:
    """Sums of each chunk's gates up to a step and behind it, [B, H parts, T] with whole chunks."""
    batch, length, heads = log2.shape
    log2 = jnp.repeat(jnp.swapaxes(log2, 1, 2), parts, axis=1)
    log2 = jnp.pad(log2, ((0, 0), (0, 0), (0, -length % PIECE))).reshape(batch, heads * parts, -1, PIECE)
    after = jnp.pad(log2[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    sums = jnp.cumsum(log2, -1), jnp.cumsum(after[..., ::-1], -1)[..., ::-1]
    return tuple(x.reshape(batch, heads * parts, -1) for x in sums)


def halves_of_gates(log2: Float[Array, "B T H C"]) -> tuple[Array, Array]:
    """bf16 numbers whose sum has 16 bits of each gate.

    XLA may drop a cast to bf16 and back, but no `reduce_precision`.
    """
    high = lax.reduce_precision(log2, exponent_bits=8, mantissa_bits=7)
    return _matrix(high.astype(jnp.bfloat16)), _matrix((log2 - high).astype(jnp.bfloat16))


def _matrix(x: Float[Array, "B T H C"]) -> Float[Array, "B padded H*C"]:
    """Heads side by side, and a multiple of 8 steps, as the copy engine wants it."""
    return jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, -x.shape[1] % 8), (0, 0)))
