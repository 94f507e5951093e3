"""How benchmarks leave their figures."""

import json
from pathlib import Path

import pytest

from experiments.benchmark._results import save


def test_figures_lie_beside_what_they_were_measured_on(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.json"
    save(str(out), {"seconds": 2.0})
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["seconds"] == 2.0
    assert written["devices"]["platform"] == "cpu"


def test_a_figure_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    with pytest.raises(ValueError, match=r"figures named \['devices'\] would be lost"):
        save(str(out), {"devices": 2})
    assert not out.exists()
