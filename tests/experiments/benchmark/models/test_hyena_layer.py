"""A Hyena layer and its parts: the figures that the benchmark leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmark.models import hyena_layer as script


@pytest.mark.parametrize("given", [{"lengths": ()}, {"lengths": (0,)}, {"kinds": ()}], ids=str)
def test_nothing_to_time_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to time: name kinds and lengths from 1 on, got"):
        script.hyena_layer(str(tmp_path / "layer.json"), **given)


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize("kind", ["implicit", "modal"])
def test_layer_figures(kind: script.Kind, tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    script.hyena_layer(str(out), lengths=(600,), kinds=(kind,), tokens=1200, dim=4)
    (layer,) = json.loads(out.read_text())["layers"]
    assert (layer["filter"], layer["rows"], layer["length"]) == (kind, 2, 600)
    parts = layer["parts"]
    assert set(parts) == {"layer", "mixer", "mlp", "convolution"} | (
        {"taps"} if kind == "implicit" else set()
    )
    for label in script.PASSES:
        assert parts["layer"][label]["share"] == 1
        for part in parts.values():
            expected = part[label]["median"] / parts["layer"][label]["median"]
            assert part[label]["share"] == pytest.approx(expected)
