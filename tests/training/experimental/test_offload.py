"""Optimiser state on the host: the same updates, also of parameters that a mesh splits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.parallel import make_mesh
from jaxblt.training.experimental.offload import offload


def test_updates_are_the_same_and_moments_are_on_the_host() -> None:
    split = NamedSharding(make_mesh(data=1, fsdp=8), PartitionSpec("fsdp"))
    weights = jax.device_put(np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32), split)
    found = {}
    optimizers = {"device": optax.lion(0.1), "host": offload(optax.lion(0.1))}
    for name, optimizer in optimizers.items():
        update = jax.jit(optimizer.update)
        params, state = {"w": weights}, optimizer.init({"w": weights})
        for _ in range(3):
            updates, state = update(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
        found[name] = params, state
    moments = [leaf.sharding for leaf in jax.tree.leaves(found["host"][1]) if leaf.ndim]
    assert moments == [split.with_memory_kind("pinned_host")]
    jax.tree.map(np.testing.assert_array_equal, *found.values())
