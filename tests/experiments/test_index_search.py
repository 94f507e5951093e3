"""The benchmark of an index's search, tiny: what it leaves is what the results show."""

import json
from pathlib import Path

from experiments.benchmark._adaptation_tables import searches
from experiments.benchmark.index_search import index_search


def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "search.json"
    index_search(str(out), chunks=(1024, 2048), dim=64, queries=2, neighbours=2)
    found = json.loads(out.read_text())
    one, two = found["searches"]
    assert one["temporary_bytes"] < one["argument_bytes"] < two["argument_bytes"]
    page = searches({"index_search": found})
    assert "2 nearest of an index's chunks for 2 queries of width 64" in page
    assert "| 2,048 | " in page
