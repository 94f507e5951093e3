"""The benchmark of serving: what it refuses before a model is drawn."""

import pytest

from experiments.benchmark.models.serving import serving


def test_a_size_without_static_patches_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--size books_1b has entropy patches: add --patches entropy"):
        serving(str(tmp_path / "none.json"), size="books_1b")
