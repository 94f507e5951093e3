"""Kernels against chunks in XLA, or those against a loop: `python -m pallas_kernels.gated_delta_rule.bench`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, benchmark
from pallas_kernels._linear_state.plans import decode_plan, rows_plan
from pallas_kernels.gated_delta_rule.api import TABLE, gated_delta_rule
from pallas_kernels.gated_delta_rule.shapes import SHAPES, DeltaRuleShape

CHUNK = 64
"""Steps of a chunk, as by default."""


def arrays(shape: DeltaRuleShape) -> dict[str, Any]:
    """Draw bf16 streams with keys of length 1, fp32 beta, and gates.

    Gates keep from a few steps to a few thousand.
    """
    keys, batch = jax.random.split(jax.random.key(1), 5), (shape.batch, shape.length)
    narrow, full = (*batch, shape.key_heads, shape.keys), (*batch, shape.heads, shape.values)
    k = jax.random.normal(keys[1], narrow)
    return {
        "q": jax.random.normal(keys[0], narrow, jnp.bfloat16),
        "k": (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(jnp.bfloat16),
        "v": jax.random.normal(keys[2], full, jnp.bfloat16),
        "beta": jax.random.uniform(keys[3], full[:3]),
        "log_gate": -jnp.exp(jax.random.uniform(keys[4], full[:3], minval=-8.0, maxval=0.0)),
    }


def plan(shape: DeltaRuleShape, *, chunk_size: int = CHUNK) -> Plan:
    """Return a `rows_plan`; one step is timed with a state, see `decode_plan`."""
    given = arrays(shape)
    if shape.length == 1:
        return decode_plan(gated_delta_rule, TABLE, given)
    states = shape.batch * shape.length * shape.heads
    # Count half a chunk of scores and of similar keys, of three products with them, and of the inverse; three of the
    # state.
    scores = chunk_size * (3.0 * shape.keys + 2.0 * shape.values) + chunk_size**2 / 3
    flops = states * (scores + 6.0 * shape.keys * shape.values)
    return rows_plan(gated_delta_rule, TABLE, given, flops=flops, chunk_size=chunk_size)


if __name__ == "__main__":
    print(benchmark("gated_delta_rule", SHAPES, plan))
