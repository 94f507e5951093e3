"""What of the FlexAttention peer runs without torch: who sees whom, and what it says where torch or a GPU is absent."""

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.peers import flex_attention
from pallas_kernels.patch_attention import bench, reference
from pallas_kernels.patch_attention.shapes import PatchShape

TINY = PatchShape("tiny", 2, 2, 48, 12, 1, 4, 3)


def visible(seen: flex_attention.View) -> np.ndarray:
    key = np.arange(len(seen.valid))
    return (key >= seen.low[:, None]) & (key < seen.high[:, None]) & seen.valid


def test_pool_sees_the_bytes_of_its_patch() -> None:
    seen = visible(flex_attention.view("pool", TINY)).reshape(4, TINY.capacity, 4, TINY.block_size)
    ids = bench.patch_ids(TINY).reshape(4, TINY.block_size)
    for n in range(4):
        assert (seen[n, :, n] == (ids[n] == np.arange(TINY.capacity)[:, None])).all()
    assert seen.sum() == ids.size


def test_lookup_sees_what_the_reference_sees() -> None:
    """Which keys a gradient of the dense version reaches."""
    q, k, _, latest, valid, bias = bench.lookup_arguments(TINY)
    keys = k.shape[2]
    one_hot = jnp.broadcast_to(jnp.eye(keys)[:, None], (*k.shape[:3], 1, keys))
    weights = reference.lookup(
        *(jnp.zeros((*x.shape[:3], 1, keys)) for x in (q, k)), one_hot, latest, valid, bias, look_back=3
    )
    seen = visible(flex_attention.view("lookup", TINY)).reshape(4, TINY.block_size, 4, keys)
    expected = np.asarray(weights > 0).reshape(4, TINY.block_size, keys)
    for n in range(4):
        assert (seen[n, :, n] == expected[n]).all()
    assert seen.sum() == expected.sum() > 0


def test_refuses_an_unknown_shape() -> None:
    with pytest.raises(ValueError, match=r"no shapes huge: expected some of blt_1b_8k"):
        flex_attention.flex_attention(shapes=("huge",))


def test_says_that_torch_is_absent(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match="install torch on a machine with a GPU"):
        flex_attention.flex_attention()
