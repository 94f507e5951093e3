"""The bridge between bytes and patches: patches taken by their rank, and the gradient of taking them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

from jaxblt.models.bridge import _take
from jaxblt.parallel import make_mesh
from pallas_kernels.runtime import reference_ops
from tests.tolerances import assert_close


def test_entries_and_their_gradient_are_those_of_a_gather():
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((3, 7, 4)), jnp.float32)
    index = jnp.asarray(rng.integers(0, 7, (3, 5)), jnp.int32).at[0].set(2)
    weights = jnp.asarray(rng.standard_normal((3, 5, 4)), jnp.float32)

    def run():
        """Return entries and the gradient; entries that are taken twice get the sum."""
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(_take(x, index) * weights)))(x)

    (value, gradient), takes = run(), str(jax.make_jaxpr(lambda x: _take(x, index))(x))
    with reference_ops():
        (expected, reference), plain = run(), str(jax.make_jaxpr(lambda x: _take(x, index))(x))
    assert "custom_vjp" in takes
    assert "custom_vjp" not in plain
    assert_close(value, expected, n=60)
    assert_close(gradient, reference, n=5)


def test_devices_add_up_gradients_of_entries_that_they_share():
    x, index = jnp.arange(12.0).reshape(1, 6, 2), jnp.array([[5, 0, 5, 1]])
    taken = jax.shard_map(_take, in_specs=(P(), P(None, "data")), out_specs=P(None, "data"))
    with jax.set_mesh(make_mesh(data=2, devices=jax.devices()[:2])):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(taken(x, index))))(x)
    assert_array_equal(gradient[0, :, 0], [1, 1, 0, 0, 0, 2])


def test_integers_are_taken_without_a_gradient():
    ids = jnp.arange(12).reshape(2, 6)
    assert_array_equal(_take(ids, jnp.array([[5, 0], [1, 1]])), [[5, 0], [7, 7]])
