"""Modules of one's own are imported before a command reads a run or a recipe."""

import sys
from importlib.metadata import EntryPoint

import pytest

from jaxblt.cli import plugins
from jaxblt.cli.parsing import run
from jaxblt.training.stored.serialize import from_json, to_json

MODULE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class MyMixer:
    width: int = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with modules that are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("my_mixers", "my_tasks", "my_recipes"):
        (tmp_path / f"{name}.py").write_text(MODULE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    yield tmp_path
    for name in ("my_mixers", "my_tasks", "my_recipes"):
        sys.modules.pop(name, None)


def test_any_command_reads_configs_of_modules_that_are_named(here, monkeypatch):
    stored = '{"class": "my_mixers:MyMixer", "width": 7}'
    with pytest.raises(
        ValueError, match=r"import 'my_mixers' before .*, on a command line by --import my_mixers"
    ):
        from_json(stored)
    words = [
        "score",
        "--import",
        "my_mixers",
        "run",
        "--import=my_tasks",
        "--import",
        "my_recipes.py",
        "--out",
        "x",
    ]
    monkeypatch.setattr(sys, "argv", ["jaxblt", *words])
    seen = []
    with pytest.raises(SystemExit) as stopped:
        run(seen.append)
    assert stopped.value.code == 0
    assert seen == [["score", "run", "--out", "x"]]
    assert from_json(stored).width == 7
    assert to_json(sys.modules["my_tasks"].MyMixer()).startswith('{\n  "class": "my_tasks:MyMixer"')
    assert "my_recipes" in sys.modules


def test_installed_plugins_are_imported(here, monkeypatch):
    point = EntryPoint("mine", "my_tasks", plugins.GROUP)
    sys.path.append(str(here))
    monkeypatch.setattr(
        plugins, "entry_points", lambda *, group: [point] if group == "jaxblt.plugins" else []
    )
    plugins.load_plugins()
    assert "my_tasks" in sys.modules
    monkeypatch.setattr(
        plugins, "entry_points", lambda *, group: [EntryPoint("bad", "broken", plugins.GROUP)]
    )
    with pytest.raises(
        ValueError, match=r"plugin 'bad' of an installed package \(broken\) cannot be imported: No mod"
    ):
        plugins.load_plugins()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--import"], "--import: expected a module, or a Python file, got none"),
        (["--import", "--out"], "expected a module"),
        (
            ["--import", "no_such_module"],
            r"--import no_such_module: No module named .*name a module of this folder",
        ),
        (
            ["--import", "broken"],
            r"--import broken: No module named 'nothing_like_this' \(ModuleNotFoundError\)",
        ),
        (["--import", "broken.py"], r"broken.py, line 1: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_imported_is_told(here, words, message):
    with pytest.raises(ValueError, match=message):
        plugins.take_imports(words)
    with pytest.raises(FileNotFoundError, match=r"--import none\.py: there is no such file"):
        plugins.take_imports(["--import", "none.py"])
