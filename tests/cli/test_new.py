"""Recipe files that `jaxblt new` writes make the recipes that they began from."""

import shlex
from dataclasses import replace

import pytest

from jaxblt import recipes
from jaxblt.cli.find_recipe import find_recipe
from jaxblt.cli.main import call
from jaxblt.cli.write_recipe import field_docs, recipe_source
from jaxblt.mixers import HyenaConfig
from jaxblt.training.optimisers.adamw import AdamWConfig


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_can_be_written_down(name):
    recipe = recipes.get(name)
    text = recipe_source(recipe, function="mine", file="mine.py", origin=name)
    found: dict = {}
    exec(compile(text, "mine.py", "exec"), found)
    assert found["mine"]() == recipe
    assert "# optimiser steps, the learning rate's horizon." in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_new_file_is_a_recipe_and_is_never_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call("new", ["genome.py", "--from", "ecoli"])
    assert capsys.readouterr().out == "wrote genome.py; train it with: jaxblt train genome.py:genome\n"
    assert find_recipe("genome.py:genome") == replace(recipes.get("ecoli"), name="genome")
    before = (tmp_path / "genome.py").read_bytes()
    for argv, error, says in (
        (["genome.py"], FileExistsError, "genome.py is there already, and nothing is overwritten"),
        (["away/a.py"], FileNotFoundError, "there is no folder 'away'"),
        (["mine.txt"], ValueError, "'mine.txt' is no name of a Python file: end it in .py"),
        (["mine.py", "--from", "bookz"], ValueError, "unknown recipe 'bookz'"),
    ):
        with pytest.raises(error, match=says):
            call("new", argv)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["genome.py"]
    assert (tmp_path / "genome.py").read_bytes() == before


@pytest.mark.parametrize(
    "name",
    [
        "class",
        "None",
        "1st",
        "my-recipe",
        "a b",
        "$(x)",
        "Recipe",
        "DataConfig",
        "match",
        "_mine",
        "\ufb01le",
        "e\u0301t\u00e9",
    ],
)
def test_any_name_of_a_file_gives_a_recipe_that_the_printed_command_finds(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    call("new", [f"{name}.py"])
    place = shlex.split(capsys.readouterr().out)[-1]
    assert find_recipe(place) == replace(recipes.get("demo_entropy"), name=name)


def test_what_others_named_is_text_and_no_code():
    evil = '"""\nraise SystemExit("ran")\n"""\\ \' \0 \r \U0001f600 \u2028 \udcff'
    recipe = recipes.get("demo_entropy")
    tables = replace(recipe.model.stack, mixers={evil: HyenaConfig(dim=recipe.model.stack.dim)})
    recipe = replace(recipe, name="a", init_from=evil, model=replace(recipe.model, stack=tables))
    text = recipe_source(recipe, function="mine", file=f"{evil}.py", origin=evil)
    found: dict = {}
    exec(compile(text.encode(), "mine.py", "exec"), found)
    assert found["mine"]() == recipe
    assert found["__doc__"].startswith(f"A recipe of your own, begun from {evil}.")
    assert shlex.quote(f"{evil}.py:mine") in found["__doc__"]


def test_fields_are_explained_by_their_docstrings():
    docs = field_docs(AdamWConfig)
    assert docs["learning_rate"] == "the peak of the learning rate."
    assert docs["b1"] == docs["eps"] == "of the moments."
