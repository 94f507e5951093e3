"""The latest patch of each byte: values, a gradient that is a sum over runs, and no scatter in it."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.patch_attention import take_latest
from pallas_kernels.runtime import reference_ops
from tests.tolerances import assert_close

LATEST = np.stack(
    [
        np.r_[[-1] * 3, np.repeat(np.arange(2, 9), [1, 9, 0, 30, 7, 1, 8]), [-1] * 5],
        np.r_[[-1], np.full(63, 4)],
        np.full(64, -1),
    ]
)[None].astype(np.int32)
"""Runs of no byte, one and many, bytes before the first patch, and padding behind the last."""


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((1, 3, 10, 4)).astype(np.float32), rng.standard_normal((1, 3, 64, 4)).astype(
        np.float32
    )


def pulled(z: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    found, pull = jax.vjp(lambda z: take_latest(z, jnp.asarray(LATEST)), z)
    return found, pull(dy)[0]


def test_values_and_gradients_are_those_of_a_loop() -> None:
    z, dy = arrays()
    want, gradient = np.zeros_like(dy), np.zeros_like(z, np.float64)
    for block, byte in np.argwhere(LATEST[0] >= 0):
        patch = LATEST[0, block, byte]
        want[0, block, byte] = z[0, block, patch]
        gradient[0, block, patch] += dy[0, block, byte]
    found, own = jax.jit(pulled)(z, dy)
    with reference_ops():
        plain = pulled(jnp.asarray(z), jnp.asarray(dy))[1]
    np.testing.assert_array_equal(found, want)
    for one in (own, plain):
        assert_close(one, gradient, n=64)


def test_neither_pass_scatters() -> None:
    """All bytes of a patch would add to one row, by atomics on a GPU."""
    assert "scatter" not in jax.jit(pulled).lower(*arrays()).as_text()
