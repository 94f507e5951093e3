"""What can be tested of the peer in PyTorch without PyTorch."""

import sys

import numpy as np
import pytest

from experiments.benchmark.peers import titans_pytorch


def test_shapes_are_known_and_have_two_matrices() -> None:
    with pytest.raises(ValueError, match=r"no shapes linear_16k_c512: expected some of d1024_16k_c512"):
        titans_pytorch.titans_pytorch(shapes=("linear_16k_c512",))


def test_says_that_torch_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match="install torch on a machine with a GPU"):
        titans_pytorch.titans_pytorch()


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/peers/test_titans_pytorch")
def test_steps_are_small_enough_for_no_divisor_and_no_limit() -> None:
    """Where the peer has neither: four times the gates make four times the first surprise."""
    shape = titans_pytorch.CHECKED
    cotangent = np.zeros((shape.batch, shape.length, shape.heads, shape.width), np.float32)
    cotangent[:, shape.chunk : 2 * shape.chunk] = 1.0

    def learned(step: float) -> np.ndarray:
        arrays = titans_pytorch.streams(shape, step)
        start, moved = (
            titans_pytorch._ours(shape, a, cotangent)[0] for a in (_without_steps(arrays), arrays)
        )
        return (moved - start)[:, shape.chunk : 2 * shape.chunk]

    small, large = (learned(step / shape.chunk) for step in (0.0625, 0.25))
    assert np.linalg.norm(large - 4 * small) < 0.05 * np.linalg.norm(large)


def _without_steps(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    return *arrays[:3], np.zeros_like(arrays[3]), *arrays[4:]
