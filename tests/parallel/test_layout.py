import jax
import numpy as np
import pytest

from jaxblt.parallel import make_mesh, over_sequence, seq_axis
from jaxblt.parallel.layout import CONTIGUOUS, ZIGZAG, to_contiguous, to_zigzag


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_zigzag_pairs_early_with_late_stretches(devices: int) -> None:
    order = ZIGZAG.order(4 * devices, devices)
    assert sorted(order) == list(range(4 * devices))
    np.testing.assert_array_equal(order[:4], [0, 1, 4 * devices - 2, 4 * devices - 1])
    # What a causal mask shows of all the keys is the same on every device.
    work = order.reshape(devices, -1).sum(1)
    assert len(set(work)) == 1
    np.testing.assert_array_equal(CONTIGUOUS.order(4 * devices, devices), np.arange(4 * devices))


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_half_stretches_swap_into_the_zigzag_and_back(devices: int) -> None:
    mesh = make_mesh(data=1, seq=devices, devices=jax.devices()[:devices])
    x = np.arange(2 * 4 * devices).reshape(2, 4 * devices)
    with jax.set_mesh(mesh):
        axis = seq_axis()
        assert axis is not None
        there = jax.jit(lambda x: over_sequence(lambda x, *_: to_zigzag(x, axis), x))
        back = jax.jit(lambda x: over_sequence(lambda x, *_: to_contiguous(x, axis), x))
        swapped = there(x)
        text = there.lower(x).compile().as_text() or ""
        np.testing.assert_array_equal(swapped, x[:, ZIGZAG.order(4 * devices, devices)])
        np.testing.assert_array_equal(back(swapped), x)
    assert text.count(" collective-permute(") == 2
    assert "all-gather" not in text


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"T = 20 .* 8 equal stretches of the zigzag .* pad it to 24"):
        ZIGZAG.order(20, 4)
