"""Arrays as matrices: their shapes, there and back, and an update that does not depend on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.training.optimisers.adamw import AdamWConfig, Bounded, Elementwise, make_optimizer
from jaxblt.training.optimisers.matrices import as_matrices, matrix_shape, shaped_like
from tests.tolerances import assert_close


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), ()),
        ((5,), (5,)),
        ((300, 2), (300, 2)),
        ((2048, 16, 128), (2048, 2048)),
        ((16, 128, 2048), (2048, 2048)),
        ((12, 2048, 16, 128), (24576, 2048)),
        ((1, 6144, 3), (6144, 3)),
        ((4, 0, 3), (4, 0, 3)),
    ],
)
def test_a_matrix_is_as_square_as_the_order_of_entries_allows(shape, expected):
    assert matrix_shape(shape) == expected


def test_an_update_of_matrices_is_that_of_their_arrays():
    params = {"heads": jnp.linspace(-1, 1, 4 * 2 * 3).reshape(4, 2, 3), "scale": jnp.ones(5)}
    grads = jax.tree.map(lambda p: jnp.sin(7 * p) + 2, params)
    optimizer = make_optimizer(AdamWConfig(warmup_steps=0), 1000, params)
    state = optimizer.init(params)
    assert isinstance(optimizer, Elementwise)
    plain, after = optimizer.update(grads, state, params)
    found, there = optimizer.update(*map(as_matrices, (grads, state, params)))
    assert found["heads"].shape == (4, 6)
    for ours, theirs in zip(
        jax.tree.leaves(shaped_like((found, there), (params, state))),
        jax.tree.leaves((plain, after)),
        strict=True,
    ):
        assert ours.shape == theirs.shape
        assert_close(ours, theirs, jnp.float32, 24)
    assert np.any(plain["heads"])


def test_factors_of_layers_keep_the_shapes_of_their_arrays():
    params = {"heads": jnp.ones((4, 2, 3))}
    optimizer = make_optimizer(AdamWConfig(rates=(("heads", 2.0),)), 1000, params)
    assert isinstance(optimizer, Bounded)
    assert not isinstance(optimizer, Elementwise)
