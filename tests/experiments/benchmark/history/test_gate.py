"""The commands over records: fixtures that pass and that fail, kept baselines and their trends."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.__main__ import main
from tests.profiling.history.simulated import draw_record


def written(path: Path, seconds: float, minute: int = 0, between: float = 0.0) -> str:
    draw = np.random.default_rng(minute)
    record = draw_record(draw, {"step": seconds, "other": 1.0}, minute=minute, between=between)
    path.write_text(json.dumps(record), encoding="utf-8")
    return str(path)


def test_the_gate_fails_on_a_slower_time_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, same, fast, slow = (
        written(tmp_path / f"{name}.json", seconds, minute)
        for minute, (name, seconds) in enumerate({"old": 1.0, "same": 1.0, "fast": 0.8, "slow": 1.1}.items())
    )
    main(["compare", old, same])
    main(["compare", old, fast])
    assert "faster" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["compare", old, slow])
    assert ended.value.code == 1
    assert "1 of 2 times are slower" in capsys.readouterr().out


def test_kept_records_are_the_old_side_and_have_trends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "kept")
    files = [written(tmp_path / f"{i}.json", 1.0 + 0.03 * i, i) for i in range(8)]
    main(["keep", *files, "--folder", folder])
    places = capsys.readouterr().out.splitlines()
    assert len(places) == 8
    main(["trends", str(Path(places[0]).parent)])
    step, other = capsys.readouterr().out.splitlines()[2:]
    assert "trend drift" in step
    assert "trend" not in other
    main(["compare", folder, written(tmp_path / "new.json", 1.2, 9)])  # within what kept runs vary by
    with pytest.raises(SystemExit):
        main(["compare", folder, written(tmp_path / "new.json", 2.0, 9)])


def test_a_kept_record_is_not_compared_with_itself(tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    old, slow = (written(tmp_path / f"{i}.json", seconds, i) for i, seconds in enumerate((1.0, 2.0)))
    main(["keep", slow, "--folder", folder])
    with pytest.raises(ValueError, match="alone: keep an earlier record"):
        main(["compare", folder, slow])
    main(["keep", old, "--folder", folder])
    with pytest.raises(SystemExit):
        main(["compare", folder, slow])
