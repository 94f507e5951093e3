"""Hopper: the kernels between arrays of the op. Backward keeps the inputs and makes the states of chunks again.

A document is a gate of zero at its first step. Gates reach the kernel in units of log 2, cut where nothing is left in
fp32. Values wider than a program's are heads that share their keys. Other widths are filled up with zeros.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._linear_state.tokens import count_documents, only_tokens
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.gated_linear_attention.hopper import (
    PIECE,
    WIDTHS,
    filled_keys,
    filled_values,
    program_values,
)
from pallas_kernels.gated_linear_attention.mosaic_gpu_backward import gradients, sum_parts
from pallas_kernels.gated_linear_attention.mosaic_gpu_forward import forward
from pallas_kernels.gated_linear_attention.mosaic_gpu_states import states
from pallas_kernels.gated_linear_attention.mosaic_gpu_tiles import Call, Gate
from pallas_kernels.gated_linear_attention.mosaic_gpu_wide import forward_wide
from pallas_kernels.gated_linear_attention.mosaic_gpu_wide_backward import gradients_wide

LEAST = -192.0
"""The value at which gates are cut, in units of log 2: 2^-192 is 0 in fp32."""

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
    """Compute `gated_linear_attention`; what `hopper.why_not` refuses is not checked again.

    Chunks are of 64.

    Args:
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    gates = {"log_gate": log_gate, "log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    given = [name for name, gate in gates.items() if gate is not None]
    name = given[0] if given else "log_gate"
    gate: Any = gates[name] if given else jnp.zeros(v.shape[:3], jnp.float32)
    # Widen the gate for wide keys, whose kernels have gates by value channel; in fp32, or the sum of their gradients is
    # rounded
    if name == "log_gate" and k.shape[3] > WIDTHS[-1]:
        name, gate = "log_value_gate", jnp.broadcast_to(gate.astype(jnp.float32)[..., None], v.shape)
    state = initial_state
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    arrays = vary_alike(*_fill(q, k, v, gate, state, name))
    found: Any = _attend(*arrays, segment_ids, name, float(scale), interpret)
    o, final = found[0][..., : v.shape[3]], found[1][:, :, : k.shape[3], : v.shape[3]]
    return (o, final) if output_final_state else o


def _fill(q: Array, k: Array, v: Array, gate: Array, state: Array, name: str) -> tuple[Array, ...]:
    """Fill channels with zeros up to a program's width.

    They hold a state of zeros, whatever its gate.
    """
    keys, values = filled_keys(k.shape[3]) - k.shape[3], filled_values(v.shape[3]) - v.shape[3]
    of_gate = {"log_gate": 0, "log_key_gate": keys, "log_value_gate": values}[name]

    def wider(x: Array, *counts: int) -> Array:
        pads = (0,) * (x.ndim - len(counts)) + counts
        return jnp.pad(x, [(0, n) for n in pads]) if any(pads) else x

    return wider(q, keys), wider(k, keys), wider(v, values), wider(gate, of_gate), wider(state, keys, values)


@partial(OwnGradient, nondiff_argnums=(6, 7, 8))
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
    q, k, v, log2 = _prepare(ids, q, k, v, gate)
    split = _split(k, v, GATES[name], scale, interpret)
    streams = vary_alike(*(_matrix(x) for x in (q, k, v)), *split.gates(log2), split.states(state))
    run = forward if split.call.pieces == 1 else forward_wide
    o, final = run(streams, split.call, split.heads, interpret)
    return o[:, : v.shape[1]].reshape(v.shape), split.whole_states(final)


def _attend_fwd(*args: Any) -> tuple[Any, tuple[Any, ...]]:
    return _attend(*args), args[:6]


def _attend_bwd(name: str, scale: float, interpret: Any, kept: tuple[Any, ...], cotangents: Any) -> Any:
    *arrays, ids = kept
    q, k, v, gate, state = arrays
    prepared, pull = jax.vjp(partial(_prepare, ids), q, k, v, gate)
    split = _split(k, v, GATES[name], scale, interpret)
    streams = [_matrix(x) for x in prepared[:3]]
    do, gates = _matrix(only_tokens(cotangents[0], ids)), split.gates(prepared[3])
    options: tuple[Any, ...] = (split.call, split.heads, interpret)
    before, _ = states(vary_alike(*streams[1:], *gates, split.states(state)), *options)
    ahead = vary_alike(streams[0], do, *gates, split.states(cotangents[1]))
    behind, dstate = states(ahead, *options, reverse=True)
    run = gradients if split.call.pieces == 1 else gradients_wide
    *found, dgate = run(vary_alike(*streams, do, *gates, before, behind), *options)
    dq, dk = (split.sum_heads(x, k).astype(k.dtype) for x in found[:2])
    dv = found[2][:, : v.shape[1]].reshape(v.shape)
    if split.call.gate == "head":
        dgate = sum_parts(dgate, gates[0], gate.shape[2])[:, : gate.shape[1]]
    elif split.call.gate == "key":
        dgate = split.sum_heads(dgate, k)
    else:
        dgate = dgate[:, : gate.shape[1]].reshape(gate.shape)
    return *pull((dq, dk, dv, dgate * math.log(2))), split.whole_states(dstate).astype(state.dtype), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _prepare(
    ids: Int[Array, "B T"] | None, q: Array, k: Array, v: Array, gate: Array
) -> tuple[Array, Array, Array, Array]:
    """Zero positions without a token, and return gates in units of log 2.

    Gates forget all where a document begins.
    """
    q, k, v, gate = (only_tokens(x, ids) for x in (q, k, v, gate))
    log2 = jnp.maximum(gate.astype(jnp.float32) * math.log2(math.e), LEAST)
    if ids is not None:
        begins = jnp.diff(count_documents(ids), axis=1, prepend=0) > 0
        log2 = jnp.where(begins.reshape(*begins.shape, *(1,) * (gate.ndim - 2)), LEAST, log2)
    return q, k, v, log2


class Split(NamedTuple):
    """Heads of values cut into parts that are as wide as a program takes; the heads that there are then."""

    call: Call
    heads: int
    parts: int

    def gates(self, log2: Array) -> tuple[Array, Array]:
        """Return gates as the kernels take them."""
        return sums_of_heads(log2, self.parts) if self.call.gate == "head" else halves_of_gates(log2)

    def states(self, state: Float[Array, "B H K V"]) -> Float[Array, "B heads K width"]:
        """Return states in fp32."""
        batch, _, keys, _ = state.shape
        cut = state.astype(jnp.float32).reshape(batch, -1, keys, self.parts, self.call.workers * PIECE)
        return jnp.moveaxis(cut, 3, 2).reshape(batch, self.heads, keys, -1)

    def whole_states(self, state: Float[Array, "B heads K width"]) -> Float[Array, "B H K V"]:
        """Undo `states`."""
        batch, _, keys, width = state.shape
        cut = jnp.moveaxis(state.reshape(batch, -1, self.parts, keys, width), 2, 3)
        return cut.reshape(batch, self.heads // self.parts, keys, -1)

    def sum_heads(self, x: Float[Array, "B padded C"], k: Float[Array, "B T J K"]) -> Float[Array, "B T J K"]:
        """Sum over all heads that share one of keys, in fp32 if they are several."""
        x = x[:, : k.shape[1]].reshape(*k.shape[:3], -1, k.shape[3])
        return x[:, :, :, 0] if x.shape[3] == 1 else x.astype(jnp.float32).sum(3)


def _split(k: Array, v: Array, gate: Gate, scale: float, interpret: Any) -> Split:
    (_, length, heads, values), keys = v.shape, k.shape[3]
    pieces = -(-keys // WIDTHS[-1])
    width = program_values(keys, values, by_key=gate == "key")
    parts = values // width
    call = Call(
        gate=gate,
        chunks=-(-length // PIECE),
        ratio=heads * parts // k.shape[2],
        keys=keys // pieces // PIECE,
        workers=width // PIECE,
        scale=scale,
        simulated=interpret is not None,
        pieces=pieces,
    )
    return Split(call, heads * parts, parts)


def sums_of_heads(log2: Float[Array, "B T H"], parts: int) -> tuple[Array, Array]:
    """Sum each chunk's gates up to a step and behind it, [B, H parts, T] with whole chunks."""
    batch, length, heads = log2.shape
    log2 = jnp.repeat(jnp.swapaxes(log2, 1, 2), parts, axis=1)
    log2 = jnp.pad(log2, ((0, 0), (0, 0), (0, -length % PIECE))).reshape(batch, heads * parts, -1, PIECE)
    after = jnp.pad(log2[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    upto, behind = jnp.cumsum(log2, -1), jnp.cumsum(after[..., ::-1], -1)[..., ::-1]
    return upto.reshape(batch, heads * parts, -1), behind.reshape(batch, heads * parts, -1)


def halves_of_gates(log2: Float[Array, "B T H C"]) -> tuple[Array, Array]:
    """Return bf16 numbers whose sum has 16 bits of each gate.

    XLA may drop a cast to bf16 and back, but no `reduce_precision`.
    """
    high = lax.reduce_precision(log2, exponent_bits=8, mantissa_bits=7)
    return _matrix(high.astype(jnp.bfloat16)), _matrix((log2 - high).astype(jnp.bfloat16))


def _matrix(x: Float[Array, "B T H C"]) -> Float[Array, "B padded H*C"]:
    """Lay heads side by side, filled to a multiple of 8 steps, as the copy engine wants it."""
    return jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, -x.shape[1] % 8), (0, 0)))
