"""Notebooks hold the outputs of an execution, small and with their pictures, and run from top to bottom in a kernel."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.notebooks import tiny_run
from experiments.notebooks.execute import HERE, execute
from tests.test_style import SOMEBODYS_PATH

NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
LARGEST = 100_000
PLOTS = ("plt.show()", "plot_entropies(")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def assert_shown(cells: list[Any]) -> None:
    """Every cell was executed without an error, and those that plot show a picture."""
    for cell in cells:
        assert cell["execution_count"], cell["source"]
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
    plotting = [cell for cell in cells if any(plot in "".join(cell["source"]) for plot in PLOTS)]
    assert plotting
    for cell in plotting:
        assert any("image/png" in output.get("data", {}) for output in cell["outputs"]), cell["source"]


@each_notebook
def test_outputs_are_committed(path):
    assert path.stat().st_size < LARGEST
    cells = code_cells(path)
    assert_shown(cells)
    assert not SOMEBODYS_PATH.search(json.dumps([cell["outputs"] for cell in cells]))


def test_every_answer_has_a_notebook():
    assert {"quickstart", "score", "embed", "variants"} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.slow(weekly=1)
@each_notebook
def test_a_kernel_executes_it(path, tmp_path, monkeypatch):
    """With a run of few steps: its answers are as good as their model, and of the same shapes."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    shutil.copy(path, tmp_path)
    script = Path(tiny_run.__file__).read_text(encoding="utf-8")
    few = script.replace(f"STEPS = {tiny_run.STEPS}", "STEPS = 4")
    assert few != script
    (tmp_path / "tiny_run.py").write_text(few, encoding="utf-8")
    assert_shown([cell for cell in execute(tmp_path / path.name).cells if cell.cell_type == "code"])
