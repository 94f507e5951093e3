"""The demo and the notebook run from top to bottom, in this process, on one device, and the demo in small."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from IPython.core.formatters import DisplayFormatter

from jaxblt.cli import demo, patch
from jaxblt.data import config, samples
from jaxblt.data.sources import BytesSource
from jaxblt.models import StackConfig
from jaxblt.recipes import demo as recipes
from tests.compiled import compiled_once_and_quickly
from tests.training.log.test_runlog import events

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "experiments" / "notebooks" / "quickstart.ipynb"
BYTES = 40_000


@pytest.fixture(autouse=True, scope="module")
def _compiled_once_and_quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once_and_quickly(str(tmp_path_factory.mktemp("compiled"))):
        yield


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *backend: devices[:1])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of the book, in rows of a quarter of their length, and stacks of two layers at most."""
    whole = samples.sample_source

    def beginning(name: str) -> BytesSource:
        source = whole(name)
        return BytesSource([source.documents[0][:BYTES]], source.names)

    for module in (samples, config):
        monkeypatch.setattr(module, "sample_source", beginning)
    monkeypatch.setattr(recipes, "SEQ_LEN", recipes.SEQ_LEN // 4)
    monkeypatch.setattr(recipes, "BLOCK", recipes.BLOCK // 4)
    monkeypatch.setattr(recipes, "StackConfig", shallow)
    monkeypatch.setattr(recipes, "EVAL_EVERY", 2)


def shallow(*, num_layers: int, pattern: str, **fields: Any) -> StackConfig:
    return StackConfig(num_layers=min(num_layers, 2), pattern=pattern[-2:], **fields)


@pytest.mark.slow(weeks=26, group="whole runs")
def test_demo_leaves_everything_it_promises_and_goes_on(small, tmp_path, capsys):
    run = tmp_path / "demo"
    demo.main(["--run-dir", str(run), "--steps", "4", "--entropy-steps", "4"])
    said = capsys.readouterr().out
    for name in ("order-5 byte model", "gzip", "bzip2", "xz", "BLT-Hyena", "bytes a patch"):
        assert name in said
    assert (run / "patches.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "generated.txt").read_text(encoding="utf-8").startswith("The Time Traveller ")
    resolved = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert resolved["versions"]["jax"]
    assert resolved["recipe"]["patcher"]["threshold"] > 0
    logged = events(run)
    assert [event.step for event in logged.Scalars("eval/bits_per_byte")] == [2, 4]
    assert [event.step for event in logged.Images("eval/patches")] == [2]
    assert (run / "checkpoints" / "4").is_dir()
    patch.main([str(ROOT / "LICENSE"), "--run-dir", str(run), "--length", "300"])
    assert "bytes a patch" in capsys.readouterr().out


def shown(cell: str, names: dict[str, Any]) -> Any:
    """What a notebook shows below the cell: its last line's value, if that line is an expression."""
    *statements, last = ast.parse(cell).body
    if not isinstance(last, ast.Expr):
        statements, last = [*statements, last], None
    exec(compile(ast.Module(statements, []), NOTEBOOK.name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


@pytest.mark.slow(weeks=26, group="whole runs")
def test_the_notebook_runs_from_top_to_bottom(capsys):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    values = [shown("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    assert "│" in capsys.readouterr().out
    assert sum(value is not None for value in values) >= 5
    picture, _ = DisplayFormatter().format(values[-1])
    assert picture["image/png"].startswith(b"\x89PNG")
