"""Written-out gradients against `jax.grad` in a loop: `python -m pallas_kernels.neural_memory.bench`."""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._bench import Plan, Work, benchmark, in_fp32, kernels_for
from pallas_kernels._measure import Case
from pallas_kernels.neural_memory.api import TABLE, neural_memory
from pallas_kernels.neural_memory.chunks import limit, square_of
from pallas_kernels.neural_memory.shapes import SHAPES, NeuralMemoryShape
from pallas_kernels.neural_memory.two_layers import EPSILON

PRODUCTS, PRODUCTS_OF_ONE = 7, 3
"""The products of a chunk with two matrices a head (two of its read, two of its keys', three of the gradients), and
with one.
"""


def arrays(shape: NeuralMemoryShape) -> tuple[Any, ...]:
    """Draw bf16 streams with unit queries and keys, fp32 gates, and weights.

    Weights are as they are drawn for training.
    """
    keys, streams = (
        jax.random.split(jax.random.key(1), 9),
        (shape.batch, shape.length, shape.heads, shape.width),
    )
    q, k, v = (jax.random.normal(key, streams) for key in keys[:3])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    gates = [jax.random.uniform(key, streams[:3]) for key in keys[3:6]]
    matrices = [(shape.width, shape.hidden), (shape.hidden, shape.width)]
    if not shape.hidden:
        matrices = [(shape.width, shape.width)]
    weights = tuple(
        jax.random.normal(key, (shape.heads, *m)) * m[0] ** -0.5
        for key, m in zip(keys[6:], matrices, strict=False)
    )
    theta, eta, alpha = gates
    return *(x.astype(jnp.bfloat16) for x in (q, k, v)), theta, eta, 0.1 * alpha, *weights


def plan(shape: NeuralMemoryShape) -> Plan:
    """Plan the kernels that run here against XLA, or XLA against `jax.grad`.

    All are checked against XLA in fp32.
    """
    given = arrays(shape)
    args, call = given, partial(_call, shape.chunk)
    xla = Case("xla", partial(call, "xla"), args)
    weights, options = tuple(args[6:]), {"chunk_size": shape.chunk}
    able = kernels_for(TABLE, *args[:6], weights, **options)
    kernels = [Case(name, partial(call, name), args) for name in able]
    products = PRODUCTS if shape.hidden else PRODUCTS_OF_ONE
    tokens = shape.batch * shape.length * shape.heads
    flops = 2.0 * products * tokens * shape.width * (shape.hidden or shape.width)
    inputs, output = float(sum(x.nbytes for x in args)), float(given[2].nbytes)
    return Plan(
        truth=Case("truth", partial(in_fp32, xla.fn), args),
        plain=xla if kernels else Case("plain", partial(_loop, shape.chunk), args),
        versions=kernels or [xla],
        work={
            "forward": Work(flops, inputs + output),
            # Count what backward moves: it reads the inputs and the cotangent and writes the gradients.
            "forward+backward": Work(3 * flops, 3 * inputs + 2 * output),
        },
    )


def _call(chunk: int, implementation: Any, *args: Any) -> Any:
    q, k, v, theta, eta, alpha, *weights = args
    options: Any = {"chunk_size": chunk, "implementation": implementation}
    return neural_memory(q, k, v, theta, eta, alpha, tuple(weights), **options)


def _loop(chunk: int, *args: Any) -> Any:
    """Return what one would write: a scan over chunks with `jax.grad` of each one's loss.

    It takes whole chunks only.
    """
    v = args[2]

    def step(state: Any, now: Any) -> Any:
        memory, momentum = state
        q, k, v, theta, eta, alpha = now
        gradient = jax.grad(_loss)(memory, k, v, _shares(memory, k, v, theta))
        eta, alpha = (jnp.mean(x, 1)[..., None, None] for x in (eta, alpha))
        momentum = jax.tree.map(lambda s, g: eta * s - g, momentum, gradient)
        after = jax.tree.map(lambda m, s: (1 - alpha) * m + s, memory, momentum)
        kept = limit(square_of(after), after[0].shape[-1])[..., None, None]
        after, momentum = jax.tree.map(lambda x: kept * x, (after, momentum))
        return (after, momentum), _read(memory, q).astype(v.dtype)

    def chunks(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    start = tuple(jnp.broadcast_to(m, (v.shape[0], *m.shape)) for m in args[6:])
    state = (start, jax.tree.map(jnp.zeros_like, start))
    # Keep only the states for the backward pass: with what a chunk computes, 256 chunks do not fit a GPU.
    _, y = lax.scan(jax.checkpoint(step), state, tuple(chunks(x) for x in args[:6]))
    return jnp.moveaxis(y, 0, 1).reshape(v.shape)


def _product(equation: str, x: Any, weights: Any, dtype: Any) -> Any:
    precision = None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    wide: Any = {"preferred_element_type": jnp.float32, "precision": precision}
    return jnp.einsum(equation, x.astype(dtype), weights.astype(dtype), **wide)


def _read(memory: Any, x: Any) -> Any:
    found = _product("bchk,bhke->bche", x, memory[0], x.dtype)
    return found if len(memory) == 1 else x.astype(jnp.float32) + _second(memory, x.dtype, found)


def _second(memory: Any, dtype: Any, hidden: Any) -> Any:
    return _product("bche,bhek->bchk", jax.nn.silu(hidden), memory[1], dtype)


def _shares(memory: Any, k: Any, v: Any, theta: Any) -> Any:
    """Return step sizes over their divisor.

    For two matrices |grad l|^2 / (2 l) takes a pass back to x M1.
    """
    wide = k.astype(jnp.float32)
    error, curvature = _read(memory, k) - v.astype(jnp.float32), jnp.sum(wide**2, -1)
    if len(memory) == 2:
        hidden = _product("bchk,bhke->bche", k, memory[0], k.dtype)
        (slope,) = jax.vjp(lambda hidden: _second(memory, k.dtype, hidden), hidden)[1](error)
        curvature *= jnp.sum(slope**2, -1) / (jnp.sum(error**2, -1) + EPSILON)
        curvature += jnp.sum(jax.nn.silu(hidden) ** 2, -1)
    return theta / jnp.maximum(jnp.sum(theta * curvature, 1, keepdims=True), 1)


def _loss(memory: Any, k: Any, v: Any, shares: Any) -> Any:
    lost = jnp.sum(jnp.square(_read(memory, k) - v.astype(jnp.float32)), -1) / 2
    return jnp.sum(shares * lost)


def table(report: dict[str, Any]) -> str:
    """Write a line a shape and pass: milliseconds of op and loop, and their shares of the peak."""
    peak = report["ceilings"]["flops_per_second"]
    lines = [f"{'shape':18s}{'pass':18s}{'version':12s}{'ms':>10s}{'MFU':>8s}"]
    for shape, found in report["shapes"].items():
        for one in found["passes"]:
            for version, figures in one["seconds"].items():
                share = one["flops"] / figures["median"] / peak
                time = f"{1e3 * figures['median']:10.2f}{share:8.1%}"
                lines.append(f"{shape:18s}{one['pass']:18s}{version:12s}{time}")
    return "\n".join(lines)


if __name__ == "__main__":
    text = benchmark("neural_memory", SHAPES, plan)
    print(text)
    print(table(json.loads(text)), file=sys.stderr)
