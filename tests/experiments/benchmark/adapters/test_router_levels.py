"""The benchmark of levels in one program, tiny: its figures, and its check of values."""

import json
from pathlib import Path

import pytest

from experiments.benchmark.adapters import router_levels as room
from experiments.benchmark.adapters.router_levels import Setting, router_levels

TINY = Setting(dim=8, rank=2, hidden=4, chunk=4, prefix=4, shapes=((1, 12),))


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures_and_compares_values_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "levels.json"
    found = router_levels(str(out), TINY)
    (shape,) = json.loads(out.read_text())["shapes"]
    assert shape == json.loads(json.dumps(found["shapes"][0]))
    assert shape["one_over_several"]["value"] == pytest.approx(
        shape["one"]["median"] / shape["several"]["median"]
    )
    monkeypatch.setattr(room, "BOUND", -1.0)
    with pytest.raises(ValueError, match="codes of one program and of several differ by"):
        router_levels(str(out), TINY)
