"""Dropout by hashed entries."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.layers import Dropout
from jaxblt.parallel import MeshConfig
from jaxblt.random_keys import make_key


def test_dropout_drops_the_same_entries_in_both_passes_and_on_any_mesh():
    """A share of `rate`, apart for two keys; what is left is scaled so that the mean stays."""
    x, rate = jnp.ones((8, 64, 32)), 0.3

    def run(x, seed):
        return Dropout(rate).apply({}, x, rngs={"dropout": make_key(seed)})

    y, back = jax.vjp(lambda x: run(x, 1), x)
    kept, others = y > 0, run(x, 2) > 0
    assert abs(float(kept.mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / x.size) ** 0.5
    both = (1 - rate) ** 2
    assert abs(float((kept & others).mean()) - both) < 5 * (both * (1 - both) / x.size) ** 0.5
    np.testing.assert_array_equal(y, jnp.where(kept, 1 / jnp.float32(1 - rate), 0))
    np.testing.assert_array_equal(back(x)[0], y)
    with jax.set_mesh(MeshConfig(data=4, seq=2).build(jax.devices())):
        np.testing.assert_array_equal(jax.jit(run, static_argnums=1)(x, 1), y)
    assert Dropout(rate).apply({}, x) is x
