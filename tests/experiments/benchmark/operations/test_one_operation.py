"""One operation's benchmark, kept as a result."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.benchmark.operations import one_operation


def test_an_op_leaves_what_its_own_benchmark_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(line: list[str], **_: Any) -> SimpleNamespace:
        assert line[2:-1] == ["pallas_kernels.short_conv.bench", "--shapes", "small", "large", "--out"]
        Path(line[-1]).write_text('{"op": "short_conv", "shapes": {}}', encoding="utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(one_operation.subprocess, "run", run)
    one_operation.main("short_conv", str(tmp_path / "op.json"), "small", "large")
    written = json.loads((tmp_path / "op.json").read_text(encoding="utf-8"))
    assert (written["op"], written["benchmark"], written["git"]["commit"]) == (
        "short_conv",
        "kernels",
        "0" * 40,
    )
    monkeypatch.setattr(one_operation.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3))
    with pytest.raises(RuntimeError, match="the benchmark of short_conv failed with status 3"):
        one_operation.main("short_conv", str(tmp_path / "none.json"), "small")
