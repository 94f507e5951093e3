"""A finished run's figures, and where it ran."""

import json
from pathlib import Path

import pytest

from experiments.benchmark.trained_runs import record
from jaxblt.profiling.provenance import ORIGIN
from tests.experiments.benchmark.figures.test_saved import GPU

REST = dict.fromkeys(set(ORIGIN) - set(GPU))


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
