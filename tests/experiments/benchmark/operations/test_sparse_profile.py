"""The profile of attention to blocks: tiles counted one by one, and complete figures on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.operations.sparse_attention import every_nth
from experiments.benchmark.operations.sparse_profile import PRODUCTS, count_tiles, sparse_profile


def test_tiles_are_those_that_a_mask_shows() -> None:
    """Every second block of 128 under a causal mask, of 512 tokens, in tiles of 64 by 64, or by 32 for keys."""
    token = np.arange(512)
    block = token // 128
    seen = (token <= token[:, None]) & ((block[:, None] - block) % 2 == 0)
    found = count_tiles(512, 2, 64, every_nth(0.5, 128))
    for name, wide in zip(PRODUCTS, ((64, 64), (64, 64), (32, 64)), strict=True):
        tiles = seen.reshape(512 // wide[0], wide[0], 512 // wide[1], wide[1]).swapaxes(1, 2)
        live, full = tiles.any((2, 3)), tiles.all((2, 3))
        lists = live.sum(0 if name == "keys_gradient" else 1)
        assert found[name]["live"] == 2 * live.sum()
        assert found[name]["partial"] == pytest.approx((live & ~full).sum() / live.sum())
        assert found[name]["hidden"] == pytest.approx(1 - seen.sum() / (live.sum() * wide[0] * wide[1]))
        assert found[name]["longest"] == pytest.approx(lists.max() / lists.mean())
        assert found[name]["programs"] == 2 * len(lists)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    sizes = {"tokens": 128, "heads": 1, "head_dim": 8, "blocks": (64,), "densities": (0.5,)}
    found = sparse_profile(out=str(out), **sizes, sparse="xla", dense="xla", layer=0)
    assert json.loads(out.read_text(encoding="utf-8"))["calls"] == found["calls"]
    (call,) = found["calls"]
    assert call["other_seconds"] > 0
    assert found["dense_pass"]["forward_rate"] > 0
