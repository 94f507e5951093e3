"""The real parser reads the options of every command line that a document shows."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxblt import recipes
from jaxblt.adapters import AdapterConfig, Draw, RouterConfig, attach
from jaxblt.cli import finetune, main, parsing, plan, sweep, train
from jaxblt.cli.data import MADE, find
from jaxblt.cli.new import new
from jaxblt.cli.recipe_options import parse_recipe_and
from jaxblt.training.stored.resolved import Resolved, write_resolved
from tests.docs.documents import PAGES, command_lines, name_of

SHOWN = {name_of(page): lines for page in PAGES if (lines := command_lines(page))}


BANK = attach(
    recipes.get("books_hyena").model, AdapterConfig(rank=4, blocks=2, router=RouterConfig(), code=(Draw(),))
)
"""Of the run that pages call runs/bank; its router draws experts."""


class Read(Exception):
    """The command line was read."""


@pytest.fixture
def only_read(monkeypatch, tmp_path):
    """Commands stop where their options have been read, in a folder in which `jaxblt new` may write."""
    read = parsing.parse_options

    def stop(function: Any, argv: Sequence[str], **options: Any) -> Any:
        parsed = read(function, argv, **options)
        if getattr(function, "__wrapped__", None) is new:
            return parsed
        raise Read

    def stop_at_recipe(*args: Any, **options: Any) -> Any:
        parse_recipe_and(*args, **options)
        raise Read

    monkeypatch.setattr(parsing, "parse_options", stop)
    monkeypatch.setattr(finetune, "parse_options", stop)
    monkeypatch.setattr(
        finetune, "read_resolved", lambda run_dir: SimpleNamespace(recipe=recipes.get("ecoli"))
    )
    for module in (train, plan, sweep):
        monkeypatch.setattr(module, "parse_recipe_and", stop_at_recipe)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "bank").mkdir(parents=True)
    write_resolved(tmp_path / "runs" / "bank", Resolved(replace(recipes.get("books_hyena"), model=BANK), {}))


def accepted(argv: list[str]) -> bool:
    """Whether the options of one command line can be read; it runs if it writes a recipe for the next one."""
    if argv[0] == "data":
        if argv[1] == "draw":
            return argv[2] in recipes.RECIPES and len(argv) == 4
        return argv[1] == "fetch" and all(name in MADE or find(name) for name in argv[2:])
    if argv in (["doctor"], ["--version"]):
        return True
    try:
        main.main(argv)
    except Read:
        return True
    return argv[0] == "new"


@pytest.mark.parametrize("page", SHOWN)
def test_command_lines_are_read(page, only_read):
    for argv in SHOWN[page]:
        assert accepted(argv), argv


def test_tutorials_show_command_lines():
    assert sum(page.startswith("docs/tutorials/") for page in SHOWN) >= 4
    assert any(argv[0] == "train" for argv in SHOWN["docs/tutorials/own-text.md"])


@pytest.mark.parametrize(
    "argv",
    [["train", "ecoli", "--data.no-such 1"], ["score", "runs/x", "my.fa"], ["new", "a.py", "--form", "demo"]],
)
def test_a_wrong_command_line_is_told(argv, only_read, capsys):
    with pytest.raises(SystemExit):
        accepted(argv)
    assert "error: " in capsys.readouterr().err
