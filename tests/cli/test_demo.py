"""The demo and the notebook run from top to bottom, in this process, on one device, and the demo in small."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from IPython.core.formatters import DisplayFormatter

import jaxblt
from jaxblt.cli import demo
from jaxblt.cli.main import call
from jaxblt.data import config, samples
from jaxblt.data.sources import BytesSource
from jaxblt.recipes import boxed as recipes
from jaxblt.recipes import get
from tests.compiled import compiled_once_and_quickly
from tests.training.log.test_runlog import events

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "experiments" / "notebooks" / "quickstart.ipynb"
BYTES = 40_000
NAMES = ("after 2 steps on it", "english_patches, before", "order-5 byte model", "gzip", "bzip2", "xz")


@pytest.fixture(autouse=True, scope="module")
def _compiled_once_and_quickly(compiled: str) -> Iterator[None]:
    with compiled_once_and_quickly(compiled):
        yield


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *backend: devices[:1])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of the book, in rows of half their length."""
    whole = samples.sample_source

    def beginning(name: str) -> BytesSource:
        source = whole(name)
        return BytesSource([source.documents[0][:BYTES]], source.names)

    for module in (samples, config):
        monkeypatch.setattr(module, "sample_source", beginning)
    monkeypatch.setattr(recipes, "BOOK_LEN", recipes.BOOK_LEN // 2)


@pytest.mark.slow(days=28, group="long")
def test_demo_leaves_everything_it_promises_and_goes_on(small, tmp_path, capsys):
    run = tmp_path / "demo"
    call("demo", ["--run-dir", str(run), "--steps", "2"])
    said = capsys.readouterr().out
    bits = {name: float(said.partition(name)[2].split()[0]) for name in NAMES}
    assert bits["after 2 steps on it"] < min(bits[name] for name in NAMES[2:])
    assert (run / "patches.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "generated.txt").read_text(encoding="utf-8").startswith("The Time Traveller ")
    resolved = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert resolved["versions"]["jax"]
    assert resolved["recipe"]["patcher"]["threshold"] == jaxblt.load("english_patches").threshold
    assert events(run).Scalars("eval/bits_per_byte")
    assert (run / "checkpoints" / "2").is_dir()
    call("patch", [str(ROOT / "LICENSE"), "--run-dir", str(run), "--length", "300"])
    assert "bytes a patch" in capsys.readouterr().out


def shown(cell: str, names: dict[str, Any]) -> Any:
    """What a notebook shows below the cell: its last line's value, if that line is an expression."""
    *statements, last = ast.parse(cell).body
    if not isinstance(last, ast.Expr):
        statements, last = [*statements, last], None
    exec(compile(ast.Module(statements, []), NOTEBOOK.name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


@pytest.mark.slow(days=28, group="long")
def test_the_notebook_runs_from_top_to_bottom(capsys):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    values = [shown("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    assert "│" in capsys.readouterr().out
    assert sum(value is not None for value in values) >= 5
    picture, _ = DisplayFormatter().format(values[-1])
    assert picture["image/png"].startswith(b"\x89PNG")


def test_the_table_names_what_it_compares(monkeypatch, capsys):
    """On the book's first 4,000 bytes, whose counts take no time."""
    whole = samples.sample_source("book")
    monkeypatch.setattr(
        samples, "sample_source", lambda _: BytesSource([whole.documents[0][:4000]], whole.names)
    )
    monkeypatch.setattr("jaxblt.data.config.sample_source", samples.sample_source)

    def model(name, step, bits):
        recipe = SimpleNamespace(data=get("english_book").data, name=name)
        return SimpleNamespace(
            recipe=recipe, step=step, evaluate=lambda split, *, data: {"bits_per_byte": bits}
        )

    demo._compare(model("book", 24, 1.25), model("english_patches", 9176, 1.75))
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows[:2] == [["after 24 steps on it", "1.250"], ["english_patches, before", "1.750"]]
    assert [name for name, _ in rows[2:5]] == ["order-5 byte model", "gzip", "bzip2"]
