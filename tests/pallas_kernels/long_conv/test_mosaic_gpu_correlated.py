"""Sums over rows of conj(U) V by the Hopper kernel; `test_mosaic_gpu.py` has the gradients of taps made of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.long_conv.mosaic_gpu_correlated import STAGES, correlate
from tests.tolerances import assert_close

CHANNELS = 2


def spectra(rows: int, parts: int) -> tuple[jax.Array, ...]:
    """Two in fp16, and scales that differ by powers of two as those of rows do."""
    keys = jax.random.split(jax.random.key(rows), 3)
    u, v = (jax.random.normal(k, (rows * CHANNELS, parts, 64, 64), jnp.float16) for k in keys[:2])
    return u, v, jnp.exp2(jax.random.randint(keys[2], (rows * CHANNELS,), -3, 4).astype(jnp.float32))


def summed(u: Any, v: Any, inverse: Any, channels: int) -> np.ndarray:
    """The textbook, in complex f64."""

    def wide(z: Any) -> np.ndarray:
        parts = np.asarray(z, np.float64).reshape(-1, channels, z.shape[1] // 2, 2, *z.shape[2:])
        return parts[:, :, :, 0] + 1j * parts[:, :, :, 1]

    scale = np.asarray(inverse, np.float64).reshape(-1, channels, 1, 1, 1)
    sums = (np.conj(wide(u)) * wide(v) * scale).sum(0)
    both = np.stack([sums.real, sums.imag], axis=2)
    return both.reshape(channels, *u.shape[1:]).astype(np.float32)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_mosaic_gpu_correlated")
@pytest.mark.parametrize("rows", [1, STAGES, STAGES + 2])
@pytest.mark.usefixtures("no_races")
def test_simulated(rows: int) -> None:
    given = spectra(rows, 4)
    found = correlate(*given, CHANNELS, interpret=True)
    assert found.shape == (CHANNELS, 4, 64, 64)
    assert_close(found, summed(*given, CHANNELS), n=2 * rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_on_a_gpu(rows: int) -> None:
    """Against f64, and the same bits twice."""
    given = spectra(rows, 16)
    run = jax.jit(partial(correlate, channels=CHANNELS, interpret=False))
    found = run(*given)
    assert np.array_equal(found, run(*given))
    assert_close(found, summed(*given, CHANNELS), n=2 * rows)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.usefixtures("no_races")
def test_two_batches_by_vmap() -> None:
    assert_two_batches(interpret=True)


@pytest.mark.gpu
def test_two_batches_by_vmap_on_a_gpu() -> None:
    assert_two_batches(interpret=False)


def assert_two_batches(*, interpret: bool) -> None:
    first = spectra(3, 4)
    second = tuple(z[::-1] for z in first)
    run = partial(correlate, channels=CHANNELS, interpret=interpret)
    found = jax.jit(jax.vmap(run))(*(jnp.stack(z) for z in zip(first, second, strict=True)))
    for given, sums in zip((first, second), found, strict=True):
        assert_close(sums, summed(*given, CHANNELS), n=6)
