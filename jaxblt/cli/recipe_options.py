"""A recipe and what a command line overrides in it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro

from jaxblt import recipes
from jaxblt.cli.find_recipe import FORMS, find_recipe
from jaxblt.cli.kinds import choices, choose_kinds, unchecked
from jaxblt.cli.mesh import expand_mesh
from jaxblt.cli.parsing import parse_options
from jaxblt.training.recipe import Recipe


@dataclass(frozen=True)
class _NoOptions:
    """Options of a command that has only a recipe's."""


def parse_recipe(argv: Sequence[str], *, prog: str, about: str) -> tuple[Recipe, str]:
    """Return the recipe that `argv` names, with its overrides, and the run folder.

    Exits with a list of recipes where none is named.
    """
    recipe, run_dir, _ = parse_recipe_and(argv, _NoOptions(), prog=prog, about=about)
    return recipe, run_dir


def parse_recipe_and[T](
    argv: Sequence[str], options: T, *, prog: str, about: str, folder: str = "runs/{name}"
) -> tuple[Recipe, str, T]:
    """Return what `parse_recipe` returns, and the command's own options.

    They are a dataclass, whose values in `options` are the defaults. `folder` is the run folder that is taken where
    none is given.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(prog, about))
        raise SystemExit(0 if argv else 2)
    given, *rest = argv
    found, rest = choose_kinds(find_recipe(given), expand_mesh(rest))
    found, rest, preset = take_preset(found, rest)
    check_mixers(found, rest, given)
    default, said = clip_warmup(found, rest)
    said = preset + said

    def command(
        run_dir: Annotated[
            str, tyro.conf.arg(help="folder of the run; an existing run goes on")
        ] = folder.format(name=found.name),
        own: Any = options,
        recipe: Annotated[Recipe, tyro.conf.arg(name="")] = default,
    ) -> tuple[Recipe, str, Any]:
        return recipe, run_dir, own

    command.__annotations__["own"] = Annotated[type(options), tyro.conf.arg(name="")]
    about += (
        " --mesh seq=8,data=2 sets axes of the mesh. --preset h200 (or auto) sets what suits a type of GPU."
    )
    about += f" {choices()}"
    flags = (tyro.conf.AvoidSubcommands,)
    parsed = parse_options(command, rest, prog=f"{prog} {given}", description=about, config=flags)
    check_patch_length(parsed[0], rest)
    for line in said:
        print(line)
    return parsed


def take_preset(recipe: Recipe, argv: Sequence[str]) -> tuple[Recipe, list[str], list[str]]:
    """Apply --preset NAME of `argv`; return the recipe, the other words, and a line on what was set.

    Options of the recipe come after it, and override it. "auto" takes that of the first device.

    Raises:
      ValueError: there is no such preset, or none for the device.
    """
    name = option_value(argv, "--preset")
    if name is None:
        return recipe, list(argv), []
    from jaxblt.training.start.presets import detect, with_preset

    if name == "auto":
        import jax

        device = jax.local_devices()[0]
        name = detect(device.device_kind, (device.memory_stats() or {}).get("bytes_limit"))
    places = [i for i, word in enumerate(argv) if word.partition("=")[0] == "--preset"]
    taken = {i + step for i in places for step in (range(1) if "=" in argv[i] else range(2))}
    recipe, line = with_preset(recipe, name)
    return recipe, [word for i, word in enumerate(argv) if i not in taken], [line]


def _usage(prog: str, about: str) -> str:
    return (
        f"usage: {prog} RECIPE [--run-dir DIR] [--overrides]\n\n{about}\n\n"
        f"RECIPE is {FORMS}.\nbuilt in: {', '.join(recipes.RECIPES)}\noptions of a recipe: {prog} RECIPE --help"
    )


def check_mixers(recipe: Recipe, argv: Sequence[str], given: str) -> None:
    """Refuse a setting of a mixer that a stack's table does not hold.

    It is no option, even if the pattern names it. `given` is what the command line calls the recipe.

    Raises:
      ValueError: there is such a setting.
    """
    for word in argv:
        found = re.match(r"--([\w.-]+)\.mixers\.([^.=]+)\.", word)
        if found is None:
            continue
        stack, name = recipe, found[2]
        for field in found[1].replace("-", "_").split("."):
            stack = getattr(stack, field, None)
        mixers = getattr(stack, "mixers", {name: None})
        if name not in mixers:
            raise ValueError(
                f"{word.partition('=')[0]}: {found[1]}.mixers has {', '.join(mixers) or 'none'}, and no {name!r}"
                f" to set: write a recipe file (jaxblt new FILE.py --from {given}) and add {name!r} to its `mixers`"
            )


def check_patch_length(recipe: Recipe, argv: Sequence[str]) -> None:
    """Refuse a --bytes-per-patch of `argv` for which no threshold is calibrated.

    A stored recipe may hold one beside its threshold, which was calibrated for it.

    Raises:
      ValueError: the recipe has no patcher that looks for a threshold.
    """
    asked, patcher = option_value(argv, "--bytes-per-patch"), recipe.patcher
    if asked is None or recipe.bytes_per_patch is None:
        return
    if patcher is not None and patcher.mode == "learned":
        return
    if patcher is None or not patcher.has_threshold:
        raise ValueError(
            f"--bytes-per-patch {asked} calibrates a threshold of entropies, and the patcher "
            f"{'is None' if patcher is None else f'has mode {patcher.mode!r}'}: leave it out"
        )
    if patcher.threshold is not None:
        raise ValueError(
            f"--bytes-per-patch {asked} calibrates a threshold, and patcher.threshold is {patcher.threshold} already: "
            "leave it out, or add --patcher.threshold None --patcher.capacity None"
        )


def clip_warmup(recipe: Recipe, argv: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Clip a recipe's warm-up to --train.steps of `argv`, and return a line that says so.

    Without clipping there is no line. The warm-up stays what it is if `argv` sets it too, or if the schedule has an end
    of its own.
    """
    steps = option_value(argv, "--train.steps")
    optimizer = recipe.optimizer
    asked = any(option_value(argv, f"--optimizer.{name}") for name in ("warmup-steps", "decay-steps"))
    if steps is None or not steps.isdigit() or asked or getattr(optimizer, "decay_steps", None) is not None:
        return recipe, []
    clipped = shorter_warmup(optimizer, int(steps))
    if clipped == optimizer:
        return recipe, []
    line = (
        f"optimizer.warmup_steps clipped from {optimizer.warmup_steps} to {clipped.warmup_steps}, to fit "
        f"--train.steps {steps}"
    )
    return unchecked(recipe, optimizer=clipped), [line]


def shorter_warmup[T](optimizer: T, steps: int) -> T:
    """Shorten an optimiser's warm-up to half of `steps`, if it did not end before them."""
    warmup = getattr(optimizer, "warmup_steps", 0)
    return optimizer if warmup < steps else replace(optimizer, warmup_steps=steps // 2)  # pyright: ignore


def option_value(argv: Sequence[str], option: str) -> str | None:
    """Return the last value of an option in `argv`.

    It is written --a.b-c 1, --a.b_c 1 or with an equals sign.
    """
    value = None
    for i, word in enumerate(argv):
        name, equals, behind = word.partition("=")
        if name.replace("_", "-") == option:
            value = behind if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return value
