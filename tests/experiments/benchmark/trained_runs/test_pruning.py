"""A pruned run is scored at each share on the same bytes, with the weights that were counted."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from experiments.benchmark.trained_runs.pruning import pruning
from jaxblt.recipes import get


@dataclass(frozen=True)
class Summed:
    """A run whose loss is the sum of its weights."""

    params: Any
    recipe: Any

    def evaluate(self, split: str, *, data: Any, max_batches: int) -> dict[str, float]:
        """Check what is asked, and return the sum."""
        assert (split, data.paths, data.context, max_batches) == ("test", ("x/*/*.txt",), 2048, 2)
        return {"bits_per_byte": float(np.sum(self.params["a"]["kernel"])), "bytes": 5.0, "loss": 1.0}


def test_a_curve_counts_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = {"a": {"kernel": jnp.asarray([[1.0, 2.0, 3.0, 4.0]]), "bias": jnp.ones(2)}}
    run = Summed(weights, SimpleNamespace(data=get("english").data))
    monkeypatch.setattr(jaxblt, "load", lambda name, dtype: run)
    found = pruning("english", ("x/*/*.txt",), str(tmp_path / "out.json"), shares=(0.0, 0.5), batches=2)
    assert (found["parameters"], found["weights"]) == (6, 4)
    assert found["curve"] == [
        {"share": 0.0, "sparsity": 0.0, "bits_per_byte": 10.0, "bytes": 5.0},
        {"share": 0.5, "sparsity": 0.5, "bits_per_byte": 7.0, "bytes": 5.0},
    ]
