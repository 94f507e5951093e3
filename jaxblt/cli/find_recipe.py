"""The recipe that a command line names: a built-in one, a function in a file, or the config that a run stored."""

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

from jaxblt import recipes
from jaxblt.remote import url_of
from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.remote_run import holds_run
from jaxblt.training.stored.resolved import FILE, read_resolved
from jaxblt.training.stored.safe_files import one_line
from jaxblt.validation import perhaps

UNKNOWN_FIELD = re.compile(r"(?P<name>\w+)\.__init__\(\) got an unexpected keyword argument '(?P<field>\w+)'")
FORMS = "a built-in recipe, FILE.py:FUNCTION, or the folder of a run (or its config.json)"


def find_recipe(given: str) -> Recipe:
    """Return a recipe: `books`, one of `my_recipe.py:my_model`, or of `runs/x/config.json`.

    Raises:
      ValueError: there is none, or what is named makes no recipe.
      FileNotFoundError: the file is not there.
    """
    file, colon, function = given.rpartition(":")
    if given.endswith(".py"):
        return from_file(given, None)
    if colon and file.endswith(".py"):
        return from_file(file, function)
    if given in recipes.RECIPES:
        return recipes.get(given)
    if given.endswith(".json") or url_of(given) or holds_run(given):
        return from_config(given)
    if "/" in given or (given and Path(given).exists()):
        # Tell of the runs that are near: no recipe is named like a path
        try:
            return read_resolved(given).recipe
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}; or name {FORMS}") from error
    hint, known = perhaps(given, recipes.RECIPES), ", ".join(recipes.RECIPES)
    raise ValueError(f"unknown recipe {given!r}{hint}, choose one of: {known}; or name {FORMS}")


def from_config(given: str) -> Recipe:
    """Return the recipe of a run, named by its folder or the config in it.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is called something else, or is not the config of a run.
    """
    if url_of(given):
        return read_resolved(given.removesuffix(f"/{FILE}")).recipe
    path = Path(given)
    folder = path if path.is_dir() else path.parent
    if path != folder and path.name != FILE:
        raise ValueError(f"{given} is not called {FILE}: a stored recipe is the {FILE} of a run's folder")
    return read_resolved(folder).recipe


def from_file(file: str, name: str | None) -> Recipe:
    """Return what a function in a Python file returns.

    Without a name it is the file's only function that says `-> Recipe`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file or the function fails, there is no such function, or it returns something else.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"no file {file!r} to take a recipe from: `jaxblt new {file}` writes one")
    module = load_file(file)
    function = _function(module, file, name)
    try:
        recipe = function()
    except Exception as error:
        raise ValueError(f"{_place(file, error)}: {one_line(error)}{_fields(error)}") from error
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"{file}:{function.__name__} returned a {type(recipe).__name__}, expected a Recipe: return Recipe(...)"
        )
    return recipe


def load_file(file: str) -> ModuleType:
    """Import a Python file as a module, with its folder on the path for files beside it.

    Raises:
      ValueError: it fails.
    """
    path = Path(file).resolve()
    name = path.stem if path.stem not in sys.modules else f"recipe_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        raise ValueError(f"{_place(file, error)}: {one_line(error)}") from error
    return module


def _function(module: ModuleType, file: str, name: str | None) -> Callable[[], Recipe]:
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    if name is None:
        made = [
            key for key, value in own.items() if value.__annotations__.get("return") in (Recipe, "Recipe")
        ]
        if len(made) != 1:
            raise ValueError(f"say which function of {file}: {_choices(file, made or list(own))}")
        name = made[0]
    found = own.get(name, getattr(module, name, None))
    if not callable(found):
        raise ValueError(f"{file} has no function {name!r}: {_choices(file, list(own))}")
    needed = [p.name for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    if needed:
        raise ValueError(
            f"{file}:{name} needs {', '.join(needed)}: a recipe is a function without arguments, or with defaults"
        )
    return found


def _choices(file: str, names: list[str]) -> str:
    if not names:
        return "it defines none; write one that returns a Recipe"
    return "choose " + " or ".join(f"{file}:{name}" for name in names)


def _fields(error: Exception) -> str:
    """Return "; NAME has the fields ..." for a config that was given a field that it lacks, or ""."""
    found = UNKNOWN_FIELD.match(str(error))
    if not isinstance(error, TypeError) or found is None:
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    configs = [frame.f_globals.get(found["name"]) for frame in frames]
    config = next(filter(is_dataclass, configs), None)
    if config is None:
        return ""
    names = [field.name for field in fields(config) if field.init]
    return f"{perhaps(found['field'], names)}; {found['name']} has the fields {', '.join(names)}"


def _place(file: str, error: Exception) -> str:
    """Return file, line and kind of an error that code in the file raised."""
    own = str(Path(file).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f"{file}, line {lines[-1]}: {type(error).__name__}" if lines else f"{file}: {type(error).__name__}"
