"""Recipes as a command line names and changes them."""

import json
from dataclasses import replace

import pytest

from jaxblt import recipes
from jaxblt.cli.find_recipe import find_recipe
from jaxblt.cli.kinds import choices, choose_kinds, kinds
from jaxblt.cli.mesh import expand_mesh, parse_mesh, without_free_axis
from jaxblt.cli.recipe_options import check_mixers, option_value, parse_recipe
from jaxblt.parallel import MeshConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.objectives.objectives import Masked, NextByte
from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.resolved import Resolved, write_resolved
from tests.training.tiny import TinyConfig, tiny_recipe

TINY = """
from tests.training.tiny import tiny_recipe
from jaxblt.training.recipe import Recipe
def first() -> Recipe:
    return tiny_recipe()
def second(steps=30):
    return tiny_recipe(steps=steps)
def wanting(steps):
    return tiny_recipe(steps=steps)
def failing() -> int:
    return 1 // 0
def wrong() -> int:
    return 1
"""


def parsed(*argv: str) -> Recipe:
    return parse_recipe(argv, prog="jaxblt train", about="")[0]


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_takes_few_steps_and_says_what_it_clips(name, capsys):
    recipe = parsed(name, "--train.steps", "20")
    assert recipe.train.steps == 20
    whole = recipes.get(name).optimizer.warmup_steps
    assert recipe.optimizer.warmup_steps == (10 if whole >= 20 else whole)
    said = f"optimizer.warmup_steps clipped from {whole} to 10, to fit --train.steps 20\n"
    assert capsys.readouterr().out == (said if whole >= 20 else "")


def test_a_warmup_that_fits_or_is_asked_for_is_left_alone(capsys):
    assert parsed("mqar", "--train.steps", "51").optimizer.warmup_steps == 50
    asked = parsed("mqar", "--train.steps=20", "--optimizer.warmup-steps", "3")
    assert asked.optimizer.warmup_steps == 3
    assert parsed("mqar", "--train.steps", "20", "--optimizer.decay_steps", "90").optimizer.warmup_steps == 50
    assert parsed("mqar", "--train.steps", "1").optimizer.warmup_steps == 0
    assert capsys.readouterr().out.count("clipped") == 1


def test_one_syntax_names_a_mesh():
    assert parsed("mqar", "--mesh", "seq=2,data=4").mesh == MeshConfig(data=4, seq=2)
    assert parsed("mqar", "--mesh=fsdp=4").mesh == MeshConfig(data=-1, fsdp=4)
    assert parsed("mqar", "--mesh.seq", "2").mesh == MeshConfig(seq=2)
    assert parse_mesh("seq=4", MeshConfig()) == MeshConfig(data=-1, seq=4)
    assert without_free_axis(MeshConfig(seq=2)) == MeshConfig(data=1, seq=2)
    for words in (["--mesh"], ["--mesh", "--name"]):
        with pytest.raises(ValueError, match="expected sizes of mesh axes such as seq=8,data=2, got none"):
            expand_mesh(words)


def test_parts_of_another_kind_are_chosen_by_name():
    assert {"next-byte", "masked", "order-agnostic"} <= set(kinds()["objective"])
    causal = tiny_recipe(model=TinyConfig(causal=False), objective=Masked())
    recipe, left = choose_kinds(causal, ["--objective", "span", "--objective.rate", "0.3", "--name", "x"])
    assert type(recipe.objective).__name__ == "Span"
    assert left == ["--objective.rate", "0.3", "--name", "x"]
    kept, _ = choose_kinds(recipes.get("mqar"), ["--objective=next-byte"])
    assert kept.objective == NextByte(accuracy=True)
    with pytest.raises(ValueError, match=r"--objective: expected one of next-byte, masked.*, got 'maskd'"):
        parsed("mqar", "--objective", "maskd")
    with pytest.raises(ValueError, match=r"--objective: expected one of next-byte.*, got no name"):
        parsed("mqar", "--objective", "--name", "x")
    with pytest.raises(ValueError, match="objective Masked needs a model with causal=False"):
        parsed("mqar", "--objective", "masked")
    assert "--objective next-byte|masked|" in choices()
    assert "--patcher none" in choices()


def test_an_optional_part_comes_with_its_options_and_goes_with_none():
    assert parsed("demo", "--patcher", "none", "--entropy-run", "None").patcher is None
    recipe, left = choose_kinds(tiny_recipe(), ["--patcher.mode", "space"])
    assert recipe.patcher == PatcherConfig()
    assert left == ["--patcher.mode", "space"]
    with pytest.raises(ValueError, match="a ByteLM has no patches, got a patcher of mode 'space'"):
        parsed("mqar", "--patcher.mode", "space")


def test_the_last_value_of_an_option_counts():
    words = ["--a.b-c", "1", "--a.b_c=2", "--a"]
    assert (option_value(words, "--a.b-c"), option_value(words, "--b")) == ("2", None)
    assert option_value(words, "--a") is None


def test_recipes_come_from_functions_in_a_file(file):
    assert find_recipe(f"{file}:first") == find_recipe(file) == tiny_recipe()
    assert parsed(f"{file}:second", "--train.steps", "31").train.steps == 31


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("third", r"mine.py has no function 'third': choose .*mine.py:first or .*mine.py:second"),
        ("wanting", r"mine.py:wanting needs steps: a recipe is a function without arguments"),
        ("failing", r"mine.py, line 11: ZeroDivisionError: .*zero"),
        ("wrong", r"mine.py:wrong returned a int, expected a Recipe"),
    ],
)
def test_functions_that_make_no_recipe_are_told(function, says, file):
    with pytest.raises(ValueError, match=says):
        find_recipe(f"{file}:{function}")


def test_files_that_hold_no_recipe_are_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file 'no.py' to take a recipe from: `jaxblt new no.py`"):
        find_recipe("no.py:first")
    for text, says in (
        ("def f(:\n", r"bad.py, line 1: invalid syntax"),
        ("x = 1\ny = z\n", r"bad.py, line 2: NameError: name 'z' is not defined"),
        (
            "from jaxblt.training import Recipe, TrainConfig\ndef f() -> Recipe:\n    return TrainConfig(stesp=1)\n",
            r"bad.py, line 3: TypeError: .*'stesp' \(perhaps steps\); TrainConfig has the fields steps, accumulate, ",
        ),
        ("x = 1\n", r"say which function of .*bad.py: it defines none; write one that returns a Recipe"),
    ):
        (tmp_path / "bad.py").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=says):
            find_recipe(str(tmp_path / "bad.py"))
    (tmp_path / "runs" / "own").mkdir(parents=True)
    (tmp_path / "runs" / "own" / "config.json").touch()
    for name in ("ow", "other"):
        with pytest.raises(
            FileNotFoundError, match=rf"runs/{name} holds no run: .*runs/own'|'.*runs' are own"
        ):
            find_recipe(str(tmp_path / "runs" / name))
    with pytest.raises(FileNotFoundError, match=r"my/recipe holds no run: .*; or name .*FILE\.py:FUNCTION"):
        find_recipe("my/recipe")
    with pytest.raises(ValueError, match="unknown recipe '', choose one of"):
        find_recipe("")
    with pytest.raises(ValueError, match=r"unknown recipe 'bookz' \(perhaps books\), .*; or name a built-in"):
        find_recipe("bookz")


def test_recipes_come_from_the_config_of_a_run(tmp_path):
    stored = replace(tiny_recipe(), name="stored")
    write_resolved(tmp_path, Resolved(stored, {}))
    assert find_recipe(str(tmp_path / "config.json")) == find_recipe(str(tmp_path)) == stored
    (tmp_path / "other.json").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"other.json is not called config.json"):
        find_recipe(str(tmp_path / "other.json"))
    with pytest.raises(FileNotFoundError, match="holds no run"):
        find_recipe(str(tmp_path / "none" / "config.json"))


def test_a_setting_of_a_mixer_outside_the_table_names_the_recipe_as_it_was_given():
    with pytest.raises(
        ValueError, match=r"mixers has window, and no 'K' to set: .*--from mine.py:mine\) and add 'K'"
    ):
        check_mixers(recipes.get("demo_entropy"), ["--model.stack.mixers.K.chunk-size=8"], "mine.py:mine")
