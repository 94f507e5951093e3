"""Two levels of learned patches over a mesh that splits the sequence: values and gradients are those of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.parallel import make_mesh
from jaxblt.parallel.rules import batch_sharding
from tests.models.test_level import CONFIG, PATCHES, sample
from tests.parameters import drawn
from tests.tolerances import tol


@pytest.mark.slow(days=28, group="models over a split axis")
@pytest.mark.parametrize("seq", [2, 4])
def test_a_split_sequence_equals_one_device(seq: int) -> None:
    module = CONFIG.build(patcher=dataclasses.replace(PATCHES, max_length=None))
    ids = jnp.asarray(sample(8, 64)[0])
    params = drawn(module, ids)["params"]
    for router in (params["router"], params["level"]["router"]):
        router |= {"theta": jnp.full(1, 0.4), "log_tau": jnp.full(1, -1.0)}

    def loss(params, ids):
        logits, _ = module.apply({"params": params}, ids)
        return jnp.mean(logits**2), logits

    both = jax.value_and_grad(loss, has_aux=True)
    (_, whole), gradients = jax.device_get(jax.jit(both)(params, ids))
    mesh = make_mesh(seq=seq, devices=jax.devices()[:seq])
    with jax.set_mesh(mesh):
        (_, split), own = jax.device_get(jax.jit(both)(params, jax.device_put(ids, batch_sharding(mesh))))
    np.testing.assert_allclose(split, whole, **tol(jnp.float32, 512))
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, **tol(jnp.float32, 512))
