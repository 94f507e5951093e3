"""Rotary angles against float64, at positions where fp32 products fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers.attention.rotary import alibi_slopes, rotary_angles, rotary_frequencies, rotate
from tests.tolerances import assert_close

FAR = np.array([[0, 1, 4095, 1_000_003, 16_777_217, 2_000_000_011]], np.int64)


def exact_angles(positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Python integers, so nothing wraps or rounds before the last step."""
    turns = [[(int(p) * int(f)) % 2**32 / 2**32 for f in frequencies] for p in positions.ravel()]
    return 2 * np.pi * np.asarray(turns).reshape(*positions.shape, -1)


def test_angles_are_exact_far_out() -> None:
    frequencies = rotary_frequencies(64)
    angles = np.asarray(rotary_angles(jnp.asarray(FAR, jnp.int32), frequencies), np.float64)
    difference = angles - exact_angles(FAR, frequencies)
    wrapped = difference - 2 * np.pi * np.round(difference / (2 * np.pi))
    assert np.max(np.abs(wrapped)) < 4 * np.pi * np.finfo(np.float32).eps


def test_frequencies_are_those_of_the_paper() -> None:
    expected = 10_000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(rotary_frequencies(64) * (2 * np.pi / 2**32), expected, atol=np.pi / 2**32)


@pytest.mark.slow(days=28, group="costly")
def test_inner_products_depend_on_distance_alone() -> None:
    key, frequencies = jax.random.key(0), rotary_frequencies(32)
    q, k = (jax.random.normal(jax.random.fold_in(key, i), (1, 1, 1, 32)) for i in (0, 1))

    def score(at: int, distance: int) -> jax.Array:
        here, there = (
            rotary_angles(jnp.full((1, 1), p, jnp.int32), frequencies) for p in (at + distance, at)
        )
        return jnp.sum(rotate(q, here) * rotate(k, there))

    for distance in (0, 1, 511, 100_000):
        near = score(0, distance)
        for at in (7, 1_048_576, 1_500_000_000):
            assert_close(score(at, distance), near, n=32, what=f"distance {distance} at {at}")


def test_rotation_is_a_complex_product() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [9, 10, 1_000_000, 5, 6]])
    angles = exact_angles(positions, rotary_frequencies(8))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, :, None]
    got = rotate(jnp.asarray(x), rotary_angles(jnp.asarray(positions, jnp.int32), rotary_frequencies(8)))
    assert_close(got, np.concatenate([turned.real, turned.imag], -1), n=4)


def test_scale_slows_positions_down() -> None:
    positions = jnp.arange(64, dtype=jnp.int32)[None]
    slow = rotary_angles(4 * positions, rotary_frequencies(16, scale=4.0))
    fast = rotary_angles(positions, rotary_frequencies(16))
    # both round their frequencies to 2^-32 turns, which 256 positions multiply
    np.testing.assert_allclose(np.exp(1j * np.asarray(slow)), np.exp(1j * np.asarray(fast)), atol=2e-6)


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim must be even, got 7"):
        rotary_frequencies(7)


def test_alibi_slopes_of_eight_heads() -> None:
    np.testing.assert_array_equal(alibi_slopes(8), 0.5 ** np.arange(1, 9))
