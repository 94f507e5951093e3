"""What tests of kernels share: a simulation of a GPU that is watched for races."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pallas_kernels import _hopper


@pytest.fixture
def no_races(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where simulated warpgroups or copies race, in any kernel: `get_races` knows of the last alone.

    Pallas' GPU dialect takes over a second to import: a test without a simulation does not pay for it.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    watched, watch = [], gpu_callbacks.GPURaceDetectionState

    def recorded(**options: Any) -> Any:
        watched.append(watch(**options))
        return watched[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", recorded)
    yield
    assert watched, "nothing was simulated"
    assert not any(kernel.races_found for kernel in watched)


@pytest.fixture
def one_watched_program(no_races: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of a convolution takes all rows of a channel, simulated and watched for races."""
    from jax.experimental.pallas import mosaic_gpu

    del no_races
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    watched = partial(mosaic_gpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic_gpu, "InterpretGPUParams", watched)


@pytest.fixture
def simulation(no_races: None) -> Any:
    """`InterpretGPUParams`, how to simulate kernels, each watched for races."""
    from jax.experimental.pallas import mosaic_gpu

    del no_races
    return mosaic_gpu.InterpretGPUParams(detect_races=True)
