"""Kernels against XLA, or XLA against a loop: `python -m pallas_kernels.gated_linear_attention.bench`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, benchmark
from pallas_kernels._linear_state.plans import decode_plan, rows_plan
from pallas_kernels.gated_linear_attention.api import TABLE, gated_linear_attention
from pallas_kernels.gated_linear_attention.shapes import SHAPES, LinearAttentionShape

CHUNK = 64
"""Steps of a chunk, as by default."""


def arrays(shape: LinearAttentionShape) -> dict[str, Any]:
    """Draw bf16 streams and fp32 gates that keep from a few steps to a few thousand."""
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
    """Return a `rows_plan`; one step is timed with a state, see `decode_plan`."""
    given = arrays(shape)
    if shape.length == 1:
        return decode_plan(gated_linear_attention, TABLE, given)
    states = shape.batch * shape.length * shape.heads
    # Count scores and their product with v of half a chunk on average, a write to and a read of the state.
    flops = states * (chunk_size * (shape.keys + shape.values) + 4.0 * shape.keys * shape.values)
    return rows_plan(gated_linear_attention, TABLE, given, flops=flops, chunk_size=chunk_size)


if __name__ == "__main__":
    print(benchmark("gated_linear_attention", SHAPES, plan))
