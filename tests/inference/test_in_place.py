"""Programs that decode: what keeps their loops in one CUDA graph, as far as it shows without a GPU."""

from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxblt.inference import Decoder
from jaxblt.inference.engine import Lane, programs
from jaxblt.inference.engine.draws import blank_table
from jaxblt.inference.unroll import unrolled
from jaxblt.models import BLTConfig, StackConfig
from jaxblt.models.adapter import CHOSEN
from jaxblt.patching import PatcherConfig
from tests.pallas_kernels.linear_state import equations


@pytest.fixture(scope="module", params=[1, 2], ids=["one row", "rows that wait"])
def traced(request: pytest.FixtureRequest) -> Any:
    """A round of the engine, traced for a small model."""
    small, lane = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=16), Lane(request.param, 64)
    model = BLTConfig(small, small, small, hash=None)
    decoder = Decoder(model, PatcherConfig(mode="static", block_size=32))
    ids, built = jnp.zeros((1, 32), jnp.int32), cast(Any, unrolled(decoder).build())
    params = nn.meta.unbox(jax.eval_shape(built.init, jax.random.key(0), ids))["params"]
    rows = jax.eval_shape(partial(programs._empty, decoder, lane))
    live = jax.ShapeDtypeStruct((request.param,), bool)
    spare = jax.eval_shape(partial(blank_table, request.param, programs.STEPS))
    given = ({"model": params, CHOSEN: {}}, rows, live, spare)
    return programs._decode.trace(unrolled(decoder), None, *given)


@pytest.mark.slow(days=28, group="costly", turn="inference/test_in_place")
def test_every_loop_computes_its_condition(traced: Any) -> None:
    """In a CUDA graph XLA would let a loop that only reads a carried boolean run before that boolean is there."""
    loops = [e for e in equations(traced.jaxpr.jaxpr) if e.primitive.name == "while"]
    conditions = [loop.params["cond_jaxpr"].jaxpr for loop in loops]
    assert len(conditions) >= 2
    assert not any(set(condition.outvars) & set(condition.invars) for condition in conditions)


@pytest.mark.slow(days=28, group="costly", turn="inference/test_in_place")
def test_a_round_stacks_nothing_that_it_carries(traced: Any) -> None:
    """XLA copies that by offsets that only the host knows, and keeps the loop out of a graph."""
    (scan,) = [e for e in traced.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    body = scan.params["jaxpr"].jaxpr
    stacked = [
        inner for inner, outer in zip(body.outvars, scan.outvars, strict=True) if inner.aval != outer.aval
    ]
    assert len(stacked) == 2
    assert not set(stacked) & set(body.invars)


@pytest.mark.slow(days=28, group="costly")
def test_draws_stay_where_they_were() -> None:
    """For a table at a new address the host would set all kernels of the graph anew."""
    small = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=16)
    decoder = Decoder(BLTConfig(small, small, small, hash=None), PatcherConfig(mode="static", block_size=32))
    built = cast(nn.Module, decoder.build())
    params = nn.meta.unbox(jax.jit(built.init)(jax.random.key(0), jnp.zeros((1, 32), jnp.int32)))["params"]
    device: Any = programs.LanePrograms(decoder, {"model": params}, Lane(2, 64), 32)
    device.decode({0})
    first, address = device.decode({0}), device._spare.unsafe_buffer_pointer()
    told = jax.device_get(first)
    device.decode({0, 1})
    assert device._spare.unsafe_buffer_pointer() == address != first.unsafe_buffer_pointer()
    assert (jax.device_get(first) == told).all()
