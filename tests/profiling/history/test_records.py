"""Records as benchmarks write them: their times, their machines, and where they are kept."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxblt.profiling.history import keep, kept, read_record, times_of
from jaxblt.profiling.history.times import benchmark_of, machine_of, platform_of
from tests.profiling.history.simulated import draw_record

PUBLISHED = Path(__file__).resolve().parents[3] / "experiments" / "results"
TIME = {"median": 2.0, "low": 1.0, "high": 3.0, "trials": 20}


def test_published_records_are_read() -> None:
    stack, scan = (read_record(PUBLISHED / f"{name}.json") for name in ("stack", "linear_scan"))
    assert machine_of(stack) == machine_of(scan) == "1 x NVIDIA H200"
    assert (benchmark_of(scan), platform_of(scan)) == ("linear_scan", "gpu")
    assert "shapes/recurrentgemma_2b_8k/passes/pass=forward/seconds/xla" in times_of(scan)
    assert all(timing.low <= timing.median <= timing.high for timing in times_of(stack).values())


def test_entries_of_lists_are_named_by_their_words_and_whole_numbers() -> None:
    rows = [{"tokens": n, "planned_bytes": 3 * n, "seconds": TIME, "method": "host"} for n in (8, 16)]
    times = times_of({"lengths": rows, "twice": [{"a": TIME, "n": 1}, {"a": TIME, "n": 1}], "bare": [TIME]})
    assert [*times] == [
        *("lengths/tokens=8/seconds", "lengths/tokens=16/seconds"),
        *("twice/n=1/a", "twice/n=1/a#2"),
        "bare/0",
    ]


def test_an_interval_gives_the_standard_error() -> None:
    draw = np.random.default_rng(0)
    timing = times_of(draw_record(draw, {"a": 1.0}, noise=0.02, trials=400))["times/a"]
    assert timing.estimate.error == pytest.approx((np.pi / 2 / 400) ** 0.5 * 0.02, rel=0.3)


def test_kept_records_lie_by_machine_and_benchmark_and_stay(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    folder, file = tmp_path / "kept", tmp_path / "new.json"
    for minute in (2, 0, 1):
        file.write_text(json.dumps(record := draw_record(draw, {"a": 1.0}, minute=minute)), encoding="utf-8")
        target = keep(file, folder)
        assert json.loads(target.read_text(encoding="utf-8")) == record
    assert target.relative_to(folder).parts[:2] == ("1_x_NVIDIA_H200", "stack")
    assert [found["time"][14:16] for found in kept(record, folder)] == ["00", "01", "02"]
    with pytest.raises(FileExistsError, match="kept already"):
        keep(file, folder)
    other = record | {"devices": record["devices"] | {"kind": "NVIDIA A100"}}
    with pytest.raises(ValueError, match=r"keeps no stack of 1_x_NVIDIA_A100, only of \['1_x_NVIDIA_H200'\]"):
        kept(other, folder)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is no JSON"), ("[]", "has no times"), ('{"a": 1}', "has no times")]
)
def test_files_without_times_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_record(file)
