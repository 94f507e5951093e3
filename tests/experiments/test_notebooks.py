"""Notebooks hold the outputs of an execution, small and with their pictures, and run from top to bottom in a kernel."""

import ast
import json
import sys
from typing import Any

import matplotlib.pyplot as plt
import pytest
from IPython.core.pylabtools import print_figure

import jaxblt
from experiments.notebooks.execute import HERE, execute
from tests.answers.runs import BYTES, make_run
from tests.compiled import compiled_once_and_quickly
from tests.test_style import SOMEBODYS_PATH

NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
ANSWERS = ("score", "embed", "variants")
LARGEST = 100_000
BRIEF = ("quickstart", "explain", "boundaries", "serving")
"""Notebooks whose runs are of few steps as they are."""
GENOME = ("phage.hyena()", "phage.hyena(12)")
SHORTENED = {
    **dict.fromkeys((*ANSWERS, "compress"), (GENOME,)),
    "finetune": (GENOME, ("steps=90", "steps=12"), ("every=30", "every=4")),
    "memory": (
        ("titans.recall()", "replace(titans.recall(), train=replace(titans.recall().train, steps=60))"),
    ),
}
"""Replaced texts of the other notebooks, so that their runs have few steps beyond the warm-up."""
PLOTS = (
    "plt.show()",
    "plot_boundaries(",
    "plot_entropies(",
    "plot_memory(",
    "plot_attributions(",
    "plot_mutagenesis(",
    "plot_motifs(",
)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(notebook: Any) -> list[dict[str, Any]]:
    """Its cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source_of(notebook: Any) -> str:
    """Return its code."""
    return "\n".join("".join(cell["source"]) for cell in cells_of(notebook))


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
    cells = cells_of(json.loads(path.read_text(encoding="utf-8")))
    assert_shown(cells)
    assert not SOMEBODYS_PATH.search(json.dumps([cell["outputs"] for cell in cells]))


@each_notebook
def test_it_imports_the_wheel_and_nothing_beside_itself(path):
    modules = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source_of(json.loads(path.read_text(encoding="utf-8")))))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules <= {"jaxblt", "jax", "flax", "numpy", "matplotlib", *sys.stdlib_module_names}


def test_every_notebook_is_brief_or_shortened():
    assert {*BRIEF, *SHORTENED} == {path.stem for path in NOTEBOOKS}


@pytest.fixture
def untrained(monkeypatch, tmp_path):
    """A folder in which notebooks find a run that nobody trained."""
    run = make_run(BYTES, data={"sample": "lambda", "kind": "fasta", "seq_len": 512})
    monkeypatch.setattr("jaxblt.training.loop.fit", lambda recipe, run_dir: None)
    monkeypatch.setattr(jaxblt, "load", lambda run_dir: run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with compiled_once_and_quickly(str(tmp_path / "compiled")):
        yield


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize("name", ANSWERS)
def test_the_cells_of_an_answer_run(name, untrained, monkeypatch):
    cells = cells_of(json.loads((HERE / f"{name}.ipynb").read_text(encoding="utf-8")))
    shown: list[bytes] = []
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: shown.append(print_figure(plt.gcf(), fmt="png", base64=False)))
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), names)
    assert [picture[:4] for picture in shown] == [b"\x89PNG"]
    plt.close("all")


@pytest.mark.slow(days=28, group="long")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kernel_executes_it(path, tmp_path, monkeypatch):
    """With runs of few steps: answers are as good as their model, and of the same shapes."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    few = path.read_text(encoding="utf-8")
    for long, short in SHORTENED.get(path.stem, ()):
        assert long in few
        few = few.replace(long, short)
    (tmp_path / path.name).write_text(few, encoding="utf-8")
    assert_shown(cells_of(execute(tmp_path / path.name)))
