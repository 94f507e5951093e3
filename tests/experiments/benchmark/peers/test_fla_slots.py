"""What can be tested of the peer in PyTorch without PyTorch."""

import sys

import jax
import numpy as np
import pytest

from experiments.benchmark.peers import fla_slots
from pallas_kernels.gated_linear_attention.shapes import LinearAttentionShape


def test_shapes_write_to_slots() -> None:
    with pytest.raises(ValueError, match="no shapes gla_1b_8k: expected some of gsa_1b_write_8k"):
        fla_slots.fla_slots(shape="gla_1b_8k")


def test_says_that_torch_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match="install torch on a machine with a GPU"):
        fla_slots.fla_slots()


def test_ours_is_what_the_peer_computes_token_by_token() -> None:
    shape = LinearAttentionShape("tiny", 1, 9, 2, 2, 8, 4, "value")
    arrays = fla_slots.streams(shape)
    q, k, v, gate = (x[0].astype(np.float64) for x in arrays)
    keys, values, read = np.zeros((2, 8, 4)), np.zeros((2, 4, 8)), []
    for t in range(shape.length):
        kept = np.exp(gate[t])
        keys = keys * kept[:, None] + k[t][:, :, None] * (1 - kept)[:, None]
        values = values * kept[:, :, None] + (1 - kept)[:, :, None] * v[t][:, None]
        weights = np.exp(np.einsum("hk,hks->hs", q[t], keys) * shape.keys**-0.5)
        read.append(np.einsum("hs,hsv->hv", weights / weights.sum(-1, keepdims=True), values))
    found = np.asarray(jax.jit(fla_slots.ours)(*fla_slots._jax_streams(arrays)), np.float64)
    assert np.linalg.norm(found[0] - read) < fla_slots.WITHIN * np.linalg.norm(read)
