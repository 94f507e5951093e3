"""Recipe files that `jaxblt new` writes make the recipes that they began from."""

from dataclasses import replace

import pytest

from jaxblt import recipes
from jaxblt.cli.find_recipe import find_recipe
from jaxblt.cli.new import main
from jaxblt.cli.write_recipe import field_docs, recipe_source
from jaxblt.training.optimizer import AdamWConfig


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
    main(["genome.py", "--from", "ecoli"])
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
            main(argv)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["genome.py"]
    assert (tmp_path / "genome.py").read_bytes() == before


def test_fields_are_explained_by_their_docstrings():
    docs = field_docs(AdamWConfig)
    assert docs["learning_rate"] == "the peak of the learning rate."
    assert docs["b1"] == docs["eps"] == "of the moments."
