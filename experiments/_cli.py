"""What the scripts share: recipes with overrides on the command line, and errors as one line."""

import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import tyro

import configs
from jaxblt.parallel.mesh import AXES, MeshConfig
from jaxblt.training.recipe import Recipe


@dataclass(frozen=True)
class _NoOptions:
    """Of a script that has a recipe's alone."""


def parse_recipe(argv: Sequence[str], *, script: str, about: str) -> tuple[Recipe, str]:
    """The recipe that `argv` names, with its overrides, and the run folder.

    Exits with a list of recipes where none is named.
    """
    recipe, run_dir, _ = parse_recipe_and(argv, _NoOptions(), script=script, about=about)
    return recipe, run_dir


def parse_recipe_and[T](argv: Sequence[str], options: T, *, script: str, about: str) -> tuple[Recipe, str, T]:
    """As `parse_recipe`, and the script's own options: a dataclass, whose values in `options` are the defaults."""
    names = ", ".join(configs.RECIPES)
    usage = f"usage: python -m {script} RECIPE [--run-dir DIR] [--overrides]\n\n{about}\n\nrecipes: {names}\n"
    usage += f"options of a recipe: python -m {script} RECIPE --help"
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        raise SystemExit(0 if argv else 2)
    name, *rest = argv
    default = configs.get(name)

    def command(
        run_dir: Annotated[
            str, tyro.conf.arg(help="folder of the run; an existing run goes on")
        ] = f"runs/{name}",
        own: Any = options,
        recipe: Annotated[Recipe, tyro.conf.arg(name="")] = default,
    ) -> tuple[Recipe, str, Any]:
        return recipe, run_dir, own

    command.__annotations__["own"] = Annotated[type(options), tyro.conf.arg(name="")]
    flags = (tyro.conf.AvoidSubcommands,)
    return tyro.cli(command, args=rest, prog=f"python -m {script} {name}", description=about, config=flags)


def parse_mesh(text: str) -> MeshConfig:
    """ "data=2,seq=4" as a mesh; axes that are not named have size 1.

    Raises:
      ValueError: an axis is unknown or comes twice, or a size is no positive number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--mesh {text!r}: {part!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}")
        if axis in sizes:
            raise ValueError(f"--mesh {text!r}: {axis} comes twice")
        sizes[axis] = int(size)
    return MeshConfig(**(dict.fromkeys(AXES, 1) | sizes))


def run(main: Callable[[Sequence[str]], Any]) -> NoReturn:
    """Calls `main` with the command line; an error that names its own fix becomes one line and exit status 1."""
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    raise SystemExit(0)


def parse[T](function: Callable[..., T], argv: Sequence[str], *, script: str) -> T:
    """Calls `function` with the options in `argv`; its docstring is the help."""
    return typing.cast(T, tyro.cli(function, args=list(argv), prog=f"python -m {script}"))
