"""Bare ops of linear states with the sequence split over devices: seconds, memory, and the share of the ideal."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmark.figures.programs import ratio, run_if_it_fits, time_on_devices
from experiments.benchmark.splitting.kinds import Op
from experiments.benchmark.splitting.split_layers import meshes
from jaxblt.mixers.driver.sequence import read
from jaxblt.mixers.linear.gated_delta_net import DeltaRule, unit
from jaxblt.mixers.linear.gated_linear_attention import LinearState
from jaxblt.training.log.report import op_choices

CHUNK = 64
WIDTH = 128
"""Channels of a head's keys and values."""


def op(kind: Op, tokens: int, heads: int, devices: int, trials: int) -> dict[str, Any]:
    """Time both passes of one document in bf16, on one device and split over all.

    Devices exchange states. speed_up is the median time on one device over that on all, and share_of_ideal that over
    the number of devices; both None where either runs out of memory. `choices` are what computes the op.
    """
    run = partial(_op_on, kind=kind, tokens=tokens, heads=heads, trials=trials)
    one, many = (run_if_it_fits(partial(run, mesh)) for mesh in meshes(devices))
    speed_up = ratio(one, many)
    share = None if speed_up is None else speed_up / devices
    shape = {"op": kind, "tokens": tokens, "heads": heads, "devices": devices}
    return shape | {"one": one, "all": many, "speed_up": speed_up, "share_of_ideal": share}


def core(kind: Op) -> LinearState | DeltaRule:
    """Return what the mixers run along the sequence."""
    return DeltaRule(CHUNK) if kind == "delta" else LinearState(kind, CHUNK)


def streams(kind: Op, tokens: int, heads: int, key: Any) -> tuple[Any, ...]:
    """Return arrays as the core takes them; gates keep from a few steps to a few thousand."""
    shape, keys = (1, tokens, heads, WIDTH), jax.random.split(key, 5)
    q, k, v = (jax.random.normal(each, shape, jnp.bfloat16) for each in keys[:3])
    gated = shape if kind == "key" else shape[:3]
    log_gate = -jnp.exp(jax.random.uniform(keys[3], gated, minval=-8.0, maxval=0.0))
    if kind == "delta":
        return unit(q), unit(k), v, jax.random.uniform(keys[4], shape[:3]), log_gate
    return q, k, v, log_gate


def passes(kind: Op, given: Any, cotangent: Any) -> tuple[Any, Any]:
    """Return outputs, and the gradients of all streams."""

    def run(given: Any) -> Any:
        v = given[2]
        rows = read(v.reshape(*v.shape[:2], -1), None, None, None)
        return rows.run(core(kind), given)[0]

    o, back = jax.vjp(run, given)
    return o, back(cotangent)


def _op_on(mesh: Mesh, kind: Op, tokens: int, heads: int, trials: int) -> dict[str, Any]:
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec(None, "seq"))
        given = jax.jit(partial(streams, kind, tokens, heads), out_shardings=split)(jax.random.key(0))
        step = jax.jit(partial(passes, kind))
        choices = op_choices(
            step, given, given[2]
        )  # before anything else traces it: a cached trace chooses nothing
        compiled = step.lower(given, given[2]).compile()
        return {"choices": choices} | time_on_devices(compiled, lambda: compiled(given, given[2]), trials)
