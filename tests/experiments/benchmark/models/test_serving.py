"""The benchmark of serving, without a model: its floor by hand, and what it refuses."""

import pytest

from experiments.benchmark.models.serving import serving
from experiments.benchmark.results.derived import serving_floor


def test_the_floor_reads_the_latent_stack_where_any_row_closes_a_patch():
    """Of two rows that close a patch at every other byte one does at three bytes of four: 2 + 4 * 3/4 = 5 are read."""
    row = {"rows": 2, "closed_a_byte": 0.5, "read_bytes": {"beside": 2, "latent": 4}}
    row |= {"copy_bytes_per_second": 10.0, "once": {"engine": {"bytes_per_second": [1.0, 3.0, 2.0]}}}
    assert serving_floor(row) == {"bytes_per_second": 4.0, "share": 0.5}


def test_a_size_without_static_patches_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--size books_1b has entropy patches: add --patches entropy"):
        serving(str(tmp_path / "none.json"), size="books_1b")
