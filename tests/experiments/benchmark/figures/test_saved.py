"""How benchmarks leave their figures, and what they refuse to leave."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmark.figures import saved
from experiments.benchmark.figures.saved import RECORD, check_origin, save, timed
from jaxblt.profiling import measure

GPU = {
    "versions": {"jax": "0.11.2", "jaxlib": "0.11.2"},
    "git": {"commit": "0123456789abcdef"},
    "cpu": "Xeon",
    "devices": {"platform": "gpu", "kind": "NVIDIA H200"},
}


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run where there is no git checkout."""
    monkeypatch.setattr(saved, "provenance", lambda: GPU | {"devices": {"platform": "cpu", "kind": "cpu"}})


def test_figures_lie_beside_what_they_were_measured_on(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.json"
    save("ring", str(out), {"seconds": 2.0})
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["seconds"] == 2.0
    assert (written["schema"], written["benchmark"]) == (saved.SCHEMA, "ring")
    assert written["devices"]["platform"] == "cpu"


def test_numbers_that_json_cannot_write_are_left_empty(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    save("ring", str(out), {"losses": [1.0, float("nan")], "gap": {"fp16": float("inf")}})
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["losses"], written["gap"]) == ([1.0, None], {"fp16": None})


def test_a_figure_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    with pytest.raises(ValueError, match=r"figures named \['devices'\] would be lost"):
        save("ring", str(out), {"devices": 2})
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"git": {"commit": None}}, "set JAXBLT_COMMIT"),
        ({"git": {"commit": "main"}}, "got main"),
        ({"versions": {"jax": "0.11.2"}}, r"\['jaxlib'\] are not among"),
        ({"devices": {"platform": "gpu", "kind": ""}}, "a result names its devices"),
        ({"cpu": ""}, "a result names its devices"),
    ],
)
def test_a_result_without_an_origin_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    with pytest.raises(ValueError, match=says):
        save("ring", str(out), {"seconds": 2.0}, origin=GPU | change)
    assert not out.exists()


def test_what_is_published_of_a_gpu_is_measured_on_one() -> None:
    with pytest.raises(ValueError, match="ring is published from a GPU, this is cpu"):
        save("ring", str(RECORD / "ring.json"), {"seconds": 2.0})
    check_origin("ring", GPU, published=True)
    check_origin("tasks", GPU | {"devices": {"platform": "cpu", "kind": "cpu"}}, published=True)


def test_a_time_has_its_interval_and_the_span_where_there_is_one() -> None:
    found = measure(lambda: None, method="host")
    taken = timed(found)
    assert set(taken) == {"median", "low", "high", "trials", "method"}
    assert taken["low"] <= taken["median"] <= taken["high"]
