"""The benchmark of an index's search, tiny."""

import json
from pathlib import Path

from experiments.benchmark.adapters.index_search import index_search


def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "search.json"
    index_search(str(out), chunks=(1024, 2048), dim=64, queries=2, neighbours=2)
    found = json.loads(out.read_text())
    one, two = found["searches"]
    assert one["temporary_bytes"] < one["argument_bytes"] < two["argument_bytes"]
    assert [at["chunks"] for at in found["searches"]] == [1024, 2048]
