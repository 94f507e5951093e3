"""The benchmark of positions by layers: its arms, and what it leaves of a short training."""

import json

import pytest

from experiments.benchmark.__main__ import main
from experiments.benchmark.models.position_layers import Setting, count_calls, position_layers, stack_of


def test_arms_call_positions_as_often_as_they_say() -> None:
    setting = Setting(blocks=5, dim=8)
    calls = {arm: count_calls(stack_of(arm, setting)) for arm in ("none", "first", "ends", "fourth", "all")}
    assert calls == {"none": 0, "first": 1, "ends": 2, "fourth": 2, "all": 5}
    with pytest.raises(ValueError, match="arms are empty"):
        position_layers("out.json", arms=())


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_short_training_leaves_bits_times_and_gaps(tmp_path) -> None:
    out = tmp_path / "positions.json"
    sizes = ["--setting.seeds", "1", "--setting.steps", "5", "--setting.blocks", "2", "--setting.dim", "8"]
    small = ["--setting.length", "16", "--setting.rows", "2"]
    main(["position_layers", "--out", str(out), "--arms", "none", "all", *sizes, *small])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["arms"]["all"]["calls"] == 2
    assert found["arms"]["all"]["parameters"] > found["arms"]["none"]["parameters"]
    gap = found["arms"]["all"]["bits_per_byte"]["value"] - found["arms"]["none"]["bits_per_byte"]["value"]
    assert found["gaps"]["all - none"]["value"] == pytest.approx(gap)
    assert found["arms"]["all"]["seconds"]["median"] > 0
