"""Kernels against XLA, or XLA against a loop: `python -m pallas_kernels.gated_linear_attention.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._bench import Plan, Work, benchmark, kernels_for
from pallas_kernels._linear_state.decode_bench import decode_plan
from pallas_kernels._measure import Case
from pallas_kernels.gated_linear_attention.api import TABLE, gated_linear_attention
from pallas_kernels.gated_linear_attention.shapes import SHAPES, LinearAttentionShape

CHUNK = 64
"""Steps of a chunk, as by default."""


def arrays(shape: LinearAttentionShape) -> dict[str, Any]:
    """bf16 streams and fp32 gates that keep from a few steps to a few thousand."""
    keys, batch = jax.random.split(jax.random.key(1), 4), (shape.batch, shape.length)
    narrow, full = (*batch, shape.key_heads, shape.keys), (*batch, shape.heads, shape.values)
    names = {
        "head": ("log_gate", full[:3]),
        "key": ("log_key_gate", narrow),
        "value": ("log_value_gate", full),
    }
    name, gated = names[shape.gate]
    return {
        "q": jax.random.normal(keys[0], narrow, jnp.bfloat16),
        "k": jax.random.normal(keys[1], narrow, jnp.bfloat16),
        "v": jax.random.normal(keys[2], full, jnp.bfloat16),
        name: -jnp.exp(jax.random.uniform(keys[3], gated, minval=-8.0, maxval=0.0)),
    }


def plan(shape: LinearAttentionShape, *, chunk_size: int = CHUNK) -> Plan:
    """The kernels that run here against XLA, or XLA against a loop over chunks; all checked against XLA in fp32.

    One step is timed with a state, see `decode_plan`.
    """
    given = arrays(shape)
    if shape.length == 1:
        return decode_plan(gated_linear_attention, TABLE, given)
    names, args = tuple(given), tuple(given.values())
    xla = Case("xla", partial(_call, "xla", names, chunk_size), args)
    kernels = [
        Case(name, partial(_call, name, names, chunk_size), args)
        for name in kernels_for(TABLE, *args[:3], **{names[3]: args[3]})
    ]
    states = shape.batch * shape.length * shape.heads
    # Scores and their product with v of half a chunk on average, a write to and a read of the state.
    flops = states * (chunk_size * (shape.keys + shape.values) + 4.0 * shape.keys * shape.values)
    inputs, output = float(sum(x.nbytes for x in args)), float(given["v"].nbytes)
    return Plan(
        truth=Case("truth", partial(_in_fp32, xla.fn), args),
        plain=xla if kernels else Case("plain", partial(_loop, names, chunk_size), args),
        versions=kernels or [xla],
        work={
            "forward": Work(flops, inputs + output),
            # Backward reads the inputs and the cotangent and writes the gradients.
            "forward+backward": Work(3 * flops, 3 * inputs + 2 * output),
        },
    )


def _call(implementation: Any, names: tuple[str, ...], chunk_size: int, *args: Any, **options: Any) -> Any:
    streams = dict(zip(names, args, strict=True))
    return gated_linear_attention(**streams, **options, chunk_size=chunk_size, implementation=implementation)


def _in_fp32(op: Any, *args: Any) -> Any:
    return op(*(x.astype(jnp.float32) for x in args)).astype(args[0].dtype)


def _loop(names: tuple[str, ...], chunk_size: int, *args: Any) -> Any:
    """One chunk after another, each from the state that the one before it leaves; the length is a multiple of it."""

    def step(state: Any, chunk: tuple[Any, ...]) -> tuple[Any, Any]:
        o, state = _call("xla", names, chunk_size, *chunk, initial_state=state, output_final_state=True)
        return state, o

    def chunks(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]), 1, 0)

    v = args[names.index("v")]
    start = jnp.zeros((v.shape[0], v.shape[2], args[0].shape[3], v.shape[3]), jnp.float32)
    _, o = lax.scan(step, start, tuple(chunks(x) for x in args))
    return jnp.moveaxis(o, 0, 1).reshape(v.shape)


if __name__ == "__main__":
    print(benchmark("gated_linear_attention", SHAPES, plan))
