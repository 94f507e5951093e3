"""Kernels against chunks in XLA, or those against a loop: `python -m pallas_kernels.gated_delta_rule.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._bench import Plan, Work, benchmark, kernels_for
from pallas_kernels._linear_state.decode_bench import decode_plan
from pallas_kernels._measure import Case
from pallas_kernels.gated_delta_rule.api import TABLE, gated_delta_rule
from pallas_kernels.gated_delta_rule.shapes import SHAPES, DeltaRuleShape

CHUNK = 64
"""Steps of a chunk, as by default."""

NAMES = ("q", "k", "v", "beta", "log_gate")


def arrays(shape: DeltaRuleShape) -> dict[str, Any]:
    """bf16 streams with keys of length 1, fp32 beta, and gates that keep from a few steps to a few thousand."""
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
    """The kernels that run here against XLA, or XLA against a loop over chunks; all checked against XLA in fp32.

    One step is timed with a state, see `decode_plan`.
    """
    given = arrays(shape)
    if shape.length == 1:
        return decode_plan(gated_delta_rule, TABLE, given)
    args = tuple(given[name] for name in NAMES)
    xla, width = Case("xla", partial(_call, "xla", chunk_size), args), shape.keys + shape.values
    kernels = [
        Case(name, partial(_call, name, chunk_size), args)
        for name in kernels_for(TABLE, *args[:4], log_gate=given["log_gate"])
    ]
    states = shape.batch * shape.length * shape.heads
    # Half a chunk of scores and of similar keys, of three products with them, and of the inverse; three of the state.
    scores = chunk_size * (2.0 * shape.keys + width + shape.values) + chunk_size**2 / 3
    flops = states * (scores + 6.0 * shape.keys * shape.values)
    inputs, output = float(sum(x.nbytes for x in args)), float(given["v"].nbytes)
    return Plan(
        truth=Case("truth", partial(_in_fp32, xla.fn), args),
        plain=xla if kernels else Case("plain", partial(_loop, chunk_size), args),
        versions=kernels or [xla],
        work={
            "forward": Work(flops, inputs + output),
            # Backward reads the inputs and the cotangent and writes the gradients.
            "forward+backward": Work(3 * flops, 3 * inputs + 2 * output),
        },
    )


def _call(implementation: Any, chunk_size: int, *args: Any, **options: Any) -> Any:
    streams = dict(zip(NAMES, args, strict=True))
    return gated_delta_rule(**streams, **options, chunk_size=chunk_size, implementation=implementation)


def _in_fp32(op: Any, *args: Any) -> Any:
    return op(*(x.astype(jnp.float32) for x in args)).astype(args[0].dtype)


def _loop(chunk_size: int, *args: Any) -> Any:
    """One chunk after another, each from the state that the one before it leaves; the length is a multiple of it."""

    def step(state: Any, chunk: tuple[Any, ...]) -> tuple[Any, Any]:
        o, state = _call("xla", chunk_size, *chunk, initial_state=state, output_final_state=True)
        return state, o

    def chunks(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]), 1, 0)

    v = args[NAMES.index("v")]
    start = jnp.zeros((v.shape[0], v.shape[2], args[0].shape[3], v.shape[3]), jnp.float32)
    _, o = lax.scan(step, start, tuple(chunks(x) for x in args))
    return jnp.moveaxis(o, 0, 1).reshape(v.shape)


if __name__ == "__main__":
    print(benchmark("gated_delta_rule", SHAPES, plan))
