"""The resolved recipe of a run, in its folder: what ran, with which versions, and enough to build it again."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from jaxblt.profiling.provenance import provenance
from jaxblt.training.recipe import Recipe, differences
from jaxblt.training.serialize import decode, encode

FILE = "config.json"
CHECKPOINTS = "checkpoints"
FIXED = ("model", "patcher", "objective", "entropy_model")
"""Parts of a recipe that a run keeps from its first step to its last."""
CALIBRATED = ("threshold", "margin", "capacity", "entropy_context")
"""Fields of a patcher that a run fills in where the recipe leaves them open."""


class Resolved(NamedTuple):
    """A run's recipe with nothing left open, and the content hash of its frozen entropy model if it has one."""

    recipe: Recipe
    frozen_hash: str | None


def write_resolved(run_dir: str | os.PathLike[str], resolved: Resolved) -> None:
    """Writes `config.json`, with versions, git commit and command line; an interrupted write leaves the old file."""
    content = {
        "recipe": encode(resolved.recipe, "recipe"),
        "frozen_hash": resolved.frozen_hash,
        **provenance(),
    }
    file = Path(run_dir) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, file)


def read_resolved(run_dir: str | os.PathLike[str]) -> Resolved:
    """What `write_resolved` wrote.

    Raises:
      FileNotFoundError: the folder holds no run.
      ValueError: the file is damaged, or was written by another version of the configs.
    """
    file = Path(run_dir) / FILE
    if not file.exists():
        raise FileNotFoundError(f"{run_dir} holds no run: {file} does not exist")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = content["recipe"], content["frozen_hash"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the config of a run: {error!r}") from error
    recipe = decode(found[0], "recipe")
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{file} holds a {type(recipe).__name__}, not a Recipe")
    return Resolved(recipe, found[1])


def continued(run_dir: str | os.PathLike[str]) -> Resolved:
    """What `write_resolved` wrote in a folder that holds checkpoints.

    Raises:
      FileNotFoundError: it is gone, so that nothing tells what the checkpoints are of.
      ValueError: as of `read_resolved`.
    """
    if not (Path(run_dir) / FILE).exists():
        raise FileNotFoundError(
            f"{run_dir} holds checkpoints but no {FILE}, which says what they are checkpoints of: put it back, "
            "delete the folder to begin anew, or choose another run_dir"
        )
    return read_resolved(run_dir)


def adopt(recipe: Recipe, stored: Resolved) -> Recipe:
    """`recipe` with what the run in progress has settled already: entropy model, threshold and capacity.

    Raises:
      ValueError: it differs from the run in the model, patcher or objective.
    """
    old = stored.recipe
    recipe = dataclasses.replace(_settle(recipe, old), entropy_model=old.entropy_model)
    changed = [d for name in FIXED for d in differences(getattr(old, name), getattr(recipe, name), name)]
    if changed:
        raise ValueError(
            "the folder holds a run of another recipe; use another folder (and init_from, to start from its "
            "parameters), or undo these changes:\n  " + "\n  ".join(changed)
        )
    return recipe


def inherit(recipe: Recipe, run_dir: str | os.PathLike[str]) -> Recipe:
    """`recipe` with threshold and capacity of the run whose parameters it starts from, where it leaves them open.

    Only if both cut by the same rule and the same entropy model: the parameters then go on reading the patches that
    they learned to read, where another sample of the data would calibrate a slightly different threshold.

    Raises:
      FileNotFoundError: the folder holds no run.
      ValueError: its config cannot be read.
    """
    old = read_resolved(run_dir).recipe
    return _settle(recipe, old) if _rule(recipe) == _rule(old) else recipe


def _settle(recipe: Recipe, old: Recipe) -> Recipe:
    patcher = recipe.patcher
    if patcher is None or old.patcher is None:
        return recipe
    missing = [name for name in CALIBRATED if getattr(patcher, name) is None]
    if patcher.threshold not in (None, old.patcher.threshold):
        missing = [name for name in missing if name != "margin"]  # of the other threshold
    settled = {name: getattr(old.patcher, name) for name in missing}
    return dataclasses.replace(recipe, patcher=dataclasses.replace(patcher, **settled))


def _rule(recipe: Recipe) -> tuple[Any, ...]:
    """How a recipe's bytes are cut, but for what is calibrated."""
    patcher = recipe.patcher
    if patcher is not None:
        patcher = dataclasses.replace(patcher, **dict.fromkeys(CALIBRATED))
    return patcher, recipe.bytes_per_patch, recipe.entropy_run


def checkpoint_dir(run_dir: str | os.PathLike[str]) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run_dir) / CHECKPOINTS
