"""What of the benchmark of FlexAttention runs without torch."""

import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.operations.sparse_attention import draw_blocks
from experiments.benchmark.peers.flex_blocks import flex_blocks, live_blocks


def test_blocks_are_those_of_the_rule() -> None:
    live = live_blocks(0.25, 4, 64)
    dense = draw_blocks(0.25, 4, 64).rule.sees(np.arange(64)[:, None], np.arange(64))
    np.testing.assert_array_equal(live.repeat(4, 0).repeat(4, 1), dense)
    assert live.diagonal().all()
    assert not live.all()


def test_says_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match="install torch on a machine with a GPU"):
        flex_blocks(str(tmp_path / "out"))
