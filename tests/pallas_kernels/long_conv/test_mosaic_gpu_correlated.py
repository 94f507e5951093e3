"""Sums over rows of conj(U) V by the Hopper kernel, alone and in gradients of taps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.long_conv import mosaic_gpu_long_backward
from pallas_kernels.long_conv.hopper import LONGEST_ON_CHIP
from pallas_kernels.long_conv.mosaic_gpu_correlated import STAGES, correlate
from pallas_kernels.long_conv.mosaic_gpu_long_backward import _correlated
from tests.pallas_kernels.long_conv.test_mosaic_gpu import (
    assert_near_rounding,
    drawn,
    halves,
    named,
    simulated,
)
from tests.tolerances import assert_close

CHANNELS = 2


def spectra(rows: int, parts: int) -> tuple[jax.Array, ...]:
    """Two in fp16, and scales that differ by powers of two as those of rows do."""
    keys = jax.random.split(jax.random.key(rows), 3)
    u, v = (jax.random.normal(k, (rows * CHANNELS, parts, 64, 64), jnp.float16) for k in keys[:2])
    return u, v, jnp.exp2(jax.random.randint(keys[2], (rows * CHANNELS,), -3, 4).astype(jnp.float32))


@pytest.mark.parametrize("rows", [1, STAGES, STAGES + 2])
@pytest.mark.usefixtures("no_races")
def test_simulated(rows: int) -> None:
    given = spectra(rows, 4)
    found = correlate(*given, CHANNELS, interpret=True)
    assert found.shape == (CHANNELS, 4, 64, 64)
    assert_close(found, _correlated(*given, CHANNELS), n=2 * rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_on_a_gpu(rows: int) -> None:
    """Against f64, and the same bits twice."""
    u, v, inverse = given = spectra(rows, 16)
    run = jax.jit(partial(correlate, channels=CHANNELS, interpret=False))
    found = run(*given)
    assert (found == run(*given)).all()

    def wide(z: Any) -> np.ndarray:
        parts = np.asarray(z, np.float64).reshape(rows, CHANNELS, 8, 2, 64, 64)
        return parts[:, :, :, 0] + 1j * parts[:, :, :, 1]

    scale = np.asarray(inverse, np.float64).reshape(rows, CHANNELS, 1, 1, 1)
    expected = (np.conj(wide(u)) * wide(v) * scale).sum(0)
    for i, part in enumerate((expected.real, expected.imag)):
        assert_close(found.reshape(CHANNELS, 8, 2, 64, 64)[:, :, i], part.astype(np.float32), n=2 * rows)


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(weeks=26, group="simulated convolutions")
def test_gradients_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu_long_backward, "ONE_PASS", True)
    arrays = drawn((2, 1, 12_289), 9000, causal=False, gates=("pre_gate",))
    assert_near_rounding(partial(simulated, dtype=jnp.float16), arrays, False)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [10_000, 16_384, LONGEST_ON_CHIP])
@pytest.mark.parametrize("run", [named, halves], ids=["vjp", "half"])
def test_gradients_on_a_gpu(run: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu_long_backward, "ONE_PASS", True)
    arrays = drawn((7, 96, length), length, causal=True, gates=("pre_gate", "post_gate"))
    assert_near_rounding(run, arrays, True)
