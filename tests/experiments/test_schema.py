"""How benchmarks leave their figures, and what they refuse to leave."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.benchmark import _op, _schema, record
from experiments.benchmark._schema import RECORD, check_origin, save, timed
from jaxblt.profiling import measure
from jaxblt.profiling.provenance import ORIGIN

GPU = {
    "versions": {"jax": "0.11.2", "jaxlib": "0.11.2"},
    "git": {"commit": "0123456789abcdef"},
    "cpu": "Xeon",
    "devices": {"platform": "gpu", "kind": "NVIDIA H200"},
}


REST = dict.fromkeys(set(ORIGIN) - set(GPU))


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run where there is no git checkout."""
    monkeypatch.setattr(_schema, "provenance", lambda: GPU | {"devices": {"platform": "cpu", "kind": "cpu"}})


def test_figures_lie_beside_what_they_were_measured_on(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.json"
    save("ring", str(out), {"seconds": 2.0})
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["seconds"] == 2.0
    assert (written["schema"], written["benchmark"]) == (_schema.SCHEMA, "ring")
    assert written["devices"]["platform"] == "cpu"


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
    check_origin("cpu_table", GPU | {"devices": {"platform": "cpu", "kind": "cpu"}}, published=True)


def test_a_time_has_its_interval_and_the_span_where_there_is_one() -> None:
    found = measure(lambda: None, method="host")
    taken = timed(found)
    assert set(taken) == {"median", "low", "high", "trials", "method"}
    assert taken["low"] <= taken["median"] <= taken["high"]


def test_an_op_leaves_what_its_own_benchmark_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(line: list[str], **_: Any) -> SimpleNamespace:
        assert line[2:-1] == ["pallas_kernels.short_conv.bench", "--shapes", "small", "large", "--out"]
        Path(line[-1]).write_text('{"op": "short_conv", "shapes": {}}', encoding="utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(_op.subprocess, "run", run)
    _op.main("short_conv", str(tmp_path / "op.json"), "small", "large")
    written = json.loads((tmp_path / "op.json").read_text(encoding="utf-8"))
    assert (written["op"], written["benchmark"], written["git"]) == ("short_conv", "kernels", GPU["git"])
    monkeypatch.setattr(_op.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3))
    with pytest.raises(RuntimeError, match="the benchmark of short_conv failed with status 3"):
        _op.main("short_conv", str(tmp_path / "none.json"), "small")


def test_a_run_is_recorded_with_what_it_ran_on(tmp_path: Path) -> None:
    line = {"bytes_per_second": 1000.0, "seconds": 8.0, "mfu": 0.3, "data_wait": 0.0, "bits_per_byte": 2.0}
    lines = [line | {"step": step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    data = {"batch_size": 4, "seq_len": 1000, "packing": "windows", "partial": "drop"}
    recipe = {"name": "tiny", "data": data, "train": {"log_every": 2}}
    config = GPU | REST | {"recipe": recipe}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "scored.json").write_text(
        '{"run": "tiny", "step": 3, "bits_per_byte": 2.5}', encoding="utf-8"
    )
    found = record.record(str(tmp_path), str(tmp_path / "scored.json"), str(tmp_path / "out.json"))
    assert (found["bytes_seen"], found["seconds_in_steps"]) == (8000, 8.0)
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (written["devices"], written["git"]) == (GPU["devices"], GPU["git"])
    for wrong, said in (
        (
            {"recipe": recipe | {"name": "other"}},
            "is of run 'tiny' at step 3, and the folder holds 'other' of 2",
        ),
        (
            {"recipe": recipe | {"train": {"log_every": 1}}},
            "is of run 'tiny' at step 3, and the folder holds 'tiny' of 2",
        ),
        (
            {"recipe": recipe | {"data": data | {"packing": "buckets"}}},
            "may hold padding, as it has .*buckets",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong), encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            record.record(str(tmp_path), str(tmp_path / "scored.json"), str(tmp_path / "other.json"))
