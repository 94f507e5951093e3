"""The benchmark of a ring's step, tiny, on the CPU: its figures and its gate."""

import json
from pathlib import Path

import pytest

from experiments.benchmark.operations.attention_parts import PartialShape, attention_parts

TINY = (PartialShape(64, 64, 4, 2, 8, True, False), PartialShape(32, 48, 2, 2, 8, False, True))


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize("shape", TINY, ids=["causal", "accumulate"])
def test_it_leaves_its_figures(shape: PartialShape, tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    calls = attention_parts(out=str(out), first="xla", second="xla", shapes=(shape,))["calls"]
    assert json.loads(out.read_text(encoding="utf-8"))["calls"] == calls
    (call,) = calls
    assert call["keys"] == shape.keys
    assert 1e-4 < call["errors"]["xla"]["o"] < 0.01
    taken = call["forward"]
    assert taken["ms"]["first"] * taken["tflops"]["first"] == pytest.approx(1e-9 * shape.flops)


def test_errors_are_held_to_the_second(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"xla errs by .*, reference by .*: 1\.25 times that is allowed"):
        attention_parts(out=str(tmp_path / "parts.json"), first="xla", second="reference", shapes=TINY[:1])


@pytest.mark.parametrize("shapes", [(), (TINY[0], TINY[1]._replace(keys=0))], ids=["none", "empty"])
def test_shapes_of_no_size_are_refused(shapes: tuple[PartialShape, ...]) -> None:
    with pytest.raises(ValueError, match="shapes must be positive tokens, keys, heads"):
        attention_parts(shapes=shapes)
