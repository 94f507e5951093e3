"""What of the benchmark beside Evo 2's own code runs without torch and a GPU."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.peers.evo2 import compared, difference, evo2, measured
from experiments.benchmark.peers.evo2_setting import Setting, Timed
from experiments.benchmark.peers.evo2_vortex import settings
from experiments.benchmark.peers.evo2_weights import sizes_of

TINY = Setting(forward=(2, 32), split=64, checked=16, mutants=2, piece=16, trials=1)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_ours_leaves_its_figures(tmp_path: Path) -> None:
    out = str(tmp_path / "evo2.json")
    evo2(out, "tiny", ("ours",), ("substitutions", "split"), TINY)
    found = [x["ours"] for x in json.loads(Path(out).read_text())["parts"].values()]
    assert (found[0]["mutants"], found[1]["devices"]) == (4, 8)
    assert all(x["seconds"] > 0 < x["peak_bytes"] for x in found)


def test_ratios_are_of_the_peer_over_ours() -> None:
    forward = {"theirs": {"seconds": 6.0, "peak_bytes": 40}, "ours": {"seconds": 4.0, "peak_bytes": 10}}
    writes = {"write": {"theirs": {"seconds": 2.0}}, "write_rows": {"ours": {"seconds": 1.0}}}
    mutants = {"substitutions": {"ours": {"seconds": 8.0, "mutants": 32}}}
    step = {"adapters": {"ours": {"seconds": 2.0, "flops": 3.0, "peak": 6.0}}}
    assert compared({"forward": forward, **writes, **mutants, **step}, Setting(forward=(8, 8192))) == {
        "forward": 1.5,
        "forward_bytes": 4.0,
        "write_rows_over_one_row": 128.0,
        "substitutions_over_alone": 2.0,
        "substitutions_over_theirs_alone": 3.0,
        "adapters_mfu": 0.25,
    }


def test_says_why_a_part_did_not_run() -> None:
    def call() -> None:
        raise MemoryError("no room\nfor it")

    found = measured(lambda: Timed(call, {}), Setting(), lambda error: "out_of_memory")
    assert found == {"out_of_memory": "no room"}
    with pytest.raises(MemoryError):
        measured(lambda: Timed(call, {}), Setting(), lambda error: None)


def test_difference_of_logits() -> None:
    theirs = np.array([[3.0, 4.0], [0.0, 0.0]])
    ours = np.array([[3.0, 4.0], [3.0, 4.0]])
    assert difference(ours, theirs) == {"relative": 1.0, "same_best": 0.5}


def test_settings_are_those_of_the_released_models() -> None:
    given = settings(sizes_of("evo2_7b_262k"), kernels=True)
    assert given["attn_layer_idxs"] == [3, 10, 17, 24, 31]
    assert given["hcl_layer_idxs"] == [2, 6, 9, 13, 16, 20, 23, 27, 30]
    assert given["rotary_emb_scaling_factor"] == 32.0
    assert given["use_hcl_kernel"]


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"unknown model 'evo2_7b', choose one of: tiny, evo2_1b_8k"):
        evo2(str(tmp_path / "out"), "evo2_7b")
    with pytest.raises(RuntimeError, match="install torch on a machine with a GPU"):
        evo2(str(tmp_path / "out"), "tiny", ("theirs",))
    with pytest.raises(ValueError, match=r"piece = 1000 must divide the 8192 bytes"):
        Setting(piece=1000)
