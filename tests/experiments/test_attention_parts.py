"""The benchmark of a ring's step, tiny, on the CPU: its figures and its gate."""

import json
from pathlib import Path

import pytest

from experiments.benchmark.attention_parts import PartShape, benchmark

TINY = (PartShape(64, 64, 4, 2, 8, True, False), PartShape(32, 48, 2, 2, 8, False, True))


def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    parts = benchmark(out=str(out), first="xla", second="xla", shapes=TINY)["parts"]
    assert json.loads(out.read_text(encoding="utf-8"))["parts"] == parts
    assert [part["keys"] for part in parts] == [64, 48]
    for part, shape, factor in zip(parts * 2, TINY * 2, (1, 1, 2.5, 2.5), strict=True):
        taken = part["forward" if factor == 1 else "gradients"]
        assert taken["ms"]["first"] * taken["tflops"]["first"] == pytest.approx(1e-9 * factor * shape.flops)
        assert all(1e-4 < error < 0.01 for error in part["errors"]["xla"].values())


def test_errors_are_held_to_the_second(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"xla errs by .*, reference by .*: 1\.25 times that is allowed"):
        benchmark(out=str(tmp_path / "parts.json"), first="xla", second="reference", shapes=TINY[:1])


@pytest.mark.parametrize("shapes", [(), (TINY[0], TINY[1]._replace(keys=0))], ids=["none", "empty"])
def test_shapes_of_no_size_are_refused(shapes: tuple[PartShape, ...]) -> None:
    with pytest.raises(ValueError, match="shapes must be positive tokens, keys, heads"):
        benchmark(shapes=shapes)
