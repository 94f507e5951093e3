"""The benchmark of streamed filters, at a tiny size."""

import json
from pathlib import Path

import pytest

from experiments.benchmark.operations import streamed_filter


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/operations/test_streamed_filter")
def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    found = streamed_filter.streamed_filter(str(out), taps=(520,), rows=(2,), channels=1, rounds=1)
    record = json.loads(out.read_text(encoding="utf-8"))
    (figures,) = record["filters"]
    assert found["filters"] == [figures]
    assert figures["flops_a_token_and_channel"]["ring"] == 2 * figures["taps"] == 1040
    assert [at["rows"] for at in figures["seconds_a_token"]] == [2]
    (token,), piece = figures["seconds_a_token"], figures["seconds_a_piece"]
    assert min(token["ring"], token["doubling"], piece["prepared"], piece["unprepared"]) > 0


def test_a_filter_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--taps must be more than 512, as fewer have no blocks: \[512\]"):
        streamed_filter.streamed_filter("nowhere.json", taps=(512, 1024))
