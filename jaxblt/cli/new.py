"""A recipe file to start from: jaxblt new my_recipe.py --from books."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from jaxblt.cli.find_recipe import find_recipe
from jaxblt.cli.write_recipe import function_name, recipe_source
from jaxblt.remote import refuse_remote


def new(
    file: Annotated[str, tyro.conf.Positional],
    origin: Annotated[str, tyro.conf.arg(name="from")] = "demo_entropy",
) -> None:
    """Write a Python file with one function that returns a recipe; never overwrite a file.

    Args:
      file: to write; its name becomes the recipe's.
      origin: recipe to begin from: a built-in one, FILE.py:FUNCTION, or the folder of a run.

    Raises:
      FileExistsError: the file is there.
      FileNotFoundError: its folder is not, or the recipe's file.
      ValueError: the name is not one of a Python file, or there is no such recipe.
    """
    refuse_remote("FILE", file)
    path = Path(file)
    if path.suffix != ".py" or not path.stem:
        raise ValueError(f"{file!r} is no name of a Python file: end it in .py, such as my_recipe.py")
    if path.exists():
        raise FileExistsError(f"{file} is there already, and nothing is overwritten: choose another name")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {str(path.parent)!r}")
    recipe = replace(find_recipe(origin), name=path.stem)
    function = function_name(recipe, path.stem)
    text = recipe_source(recipe, function=function, file=file, origin=origin)
    with path.open("x", encoding="utf-8") as out:
        out.write(text)
    print(f"wrote {file}; train it with: jaxblt train {shlex.quote(f'{file}:{function}')}")
