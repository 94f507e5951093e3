"""The benchmark of streamed filters, at a tiny size."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmark import streamed_filter


def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    found = streamed_filter.benchmark(str(out), taps=(520,), channels=1, tokens=256, trials=1)
    (figures,) = json.loads(out.read_text(encoding="utf-8"))["filters"]
    assert found["filters"] == [figures]
    assert figures.pop("taps") == 520
    assert all(figure > 0 for figure in figures.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"taps": (512,)}, "taps must be more than 512, as fewer are streamed without blocks: 512"),
        ({"tokens": 300}, "tokens must be a multiple of 512, the turn of 1024 taps, got 300"),
    ],
)
def test_sizes_that_tell_nothing_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        streamed_filter.benchmark("nowhere.json", **options)
