"""Heads of linear mixers over `tensor`, beside data and seq: as on one device, and without a gather."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.mixers import MixerConfig, init_state
from jaxblt.parallel import MeshConfig, batch_sharding
from jaxblt.parallel.rules import param_shardings
from jaxblt.testing.collectives import collectives
from tests.mixers.configs import ALL
from tests.parameters import drawn
from tests.tolerances import assert_close

ROWS, LENGTH = 4, 16
MESHES = {"data": MeshConfig(data=4, tensor=2), "seq": MeshConfig(data=2, seq=2, tensor=2)}
GROUPED = dataclasses.replace(ALL["gated_delta_net"], num_heads=4, num_key_heads=2)
CONFIGS: dict[str, MixerConfig] = {
    "delta": GROUPED,
    "one_key_head": ALL["mamba2"],
    "key_gates": ALL["gated_linear_attention"],
    "dual_decay": ALL["dual_decay"],
    "slots": ALL["state_engine"],
    "edges": ALL["state_engine_edges"],
    "gru": ALL["gru"],
    "ntm": ALL["ntm"],
}
TURNS = pytest.mark.slow(days=28, group="models over a split axis")


@functools.cache
def passes(name: str) -> tuple[Any, Any, Any]:
    """Parameters, inputs, and a function of both: outputs, gradients and outputs of a call with a state."""
    config = CONFIGS[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, LENGTH, config.dim)).astype(np.float32)
    ids = np.where(np.arange(LENGTH) < 5, 1, 2) * np.ones((ROWS, 1), np.int32)
    module = config.build()
    boxed = drawn(module, jnp.asarray(x), boxed=True)["params"]

    def all_of(params: Any, x: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            y, _ = module.apply({"params": params}, x, segment_ids=ids)
            return jnp.sum(jnp.square(y)), y

        gradients, y = jax.grad(loss, has_aux=True)(params)
        state = init_state(config, ROWS, capacity=LENGTH)
        streamed, _ = module.apply({"params": params}, x, segment_ids=ids, state=state)
        return y, gradients, streamed

    return boxed, (x, ids.astype(np.int32)), all_of


CASES = [
    (name, layout)
    for name in CONFIGS
    for layout in MESHES
    if layout == "data" or name not in ("edges", "gru", "ntm")  # those scatter heads along seq
]


@TURNS
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_heads_are_split(name: str, layout: str) -> None:
    boxed, batch, all_of = passes(name)
    mesh, params = MESHES[layout].build(), nn.meta.unbox(boxed)
    expected = jax.jit(all_of)(params, *batch)
    with jax.set_mesh(mesh):
        held = jax.device_put(params, param_shardings(boxed, mesh))
        x = jax.device_put(batch[0], NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq")))
        ids = jax.device_put(batch[1], batch_sharding(mesh))
        compiled = jax.jit(all_of).lower(held, x, ids).compile()
        found = compiled(held, x, ids)
    jax.tree.map(lambda got, want: assert_close(got, want, n=LENGTH * CONFIGS[name].dim), found, expected)
    if layout == "data":
        assert not [c for c in collectives(compiled) if c.kind == "all-gather"]
