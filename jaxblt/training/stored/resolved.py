"""The resolved recipe of a run, in its folder: what ran, with which versions, and enough to build it again."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from jaxblt.boxed import suggestion
from jaxblt.profiling.provenance import provenance
from jaxblt.show import show
from jaxblt.training.packing import forget_promises
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import ENTROPY
from jaxblt.training.stored.remote_run import CONFIG, readable
from jaxblt.training.stored.safe_files import one_line, read_json, replace_text
from jaxblt.training.stored.serialize import decode, differences, encode, from_json

FILE = CONFIG
CHECKPOINTS = "checkpoints"
FROZEN = "frozen"
HISTORY = "configs"
MAX_BYTES = 1 << 20
FIXED = (
    "model",
    "patcher",
    "objective",
    "entropy_model",
    "bytes_per_patch",
    "base_run",
    "also_train",
    "freeze",
    "reference",
)
"""Parts of a recipe that a run keeps from its first step to its last."""
FREE = (
    "name",
    "mesh",
    "train.trackers",
    "train.layer_norms",
    "train.sample_bytes",
    "train.log_every",
    "train.eval_every",
    "train.eval_start",
    "train.eval_batches",
    "train.checkpoint_every",
    "train.checkpoint_every_s",
    "train.keep",
    "train.keep_best",
    "train.patience",
    "train.best_by",
    "train.max_skips",
    "train.max_overflow",
    "train.time_limit_s",
    "train.profile_steps",
    "train.compilation_cache",
)
"""What a run may change whenever it goes on: what it is called, writes and tolerates, and where it runs."""
LINE, VALUE = 100, 60
"""Most characters of changes that stand in an error's first line, and most of one value."""
NAME, HASH = re.compile("[a-z_]{1,40}"), re.compile("[0-9a-f]{64}")
"""Of frozen trees."""
CALIBRATED = ("threshold", "margin", "capacity", "entropy_context")
"""Fields of a patcher that a run fills in where the recipe leaves them open."""


class Resolved(NamedTuple):
    """A run's recipe with nothing left open, and the content hashes of its frozen trees by name."""

    recipe: Recipe
    frozen: dict[str, str]

    __repr__ = show


def write_resolved(run_dir: str | os.PathLike[str], resolved: Resolved) -> None:
    """Write `config.json`, with versions, git commit and command line; an interrupted write leaves the old file."""
    content = {
        "recipe": encode(resolved.recipe, "recipe"),
        "frozen": resolved.frozen,
        **provenance(),
    }
    file = Path(run_dir) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps(content, indent=2, allow_nan=False) + "\n")


def keep_earlier(run_dir: str | os.PathLike[str], resolved: Resolved, step: int) -> None:
    """Copy `config.json` to `configs/000_until_step_60.json` if another recipe takes over at `step` = 60."""
    file = Path(run_dir) / FILE
    if step == 0 or read_resolved(run_dir).recipe == resolved.recipe:
        return
    history = Path(run_dir) / HISTORY
    history.mkdir(exist_ok=True)
    number = len(list(history.glob("*_until_step_*.json")))
    replace_text(history / f"{number:03d}_until_step_{step}.json", file.read_text(encoding="utf-8"))


def read_resolved(run_dir: str | os.PathLike[str]) -> Resolved:
    """Read what `write_resolved` wrote.

    Raises:
      FileNotFoundError: the folder holds no run.
      ValueError: the file is damaged, no regular file of at most a megabyte inside the folder, or was written by
        another version of the configs; one line that names it.
    """
    with readable(run_dir, "none") as folder:
        return _read(folder)


def _read(run_dir: Path) -> Resolved:
    file = run_dir / FILE
    if not file.exists():
        raise FileNotFoundError(f"{run_dir} holds no run: {file} does not exist{suggestion(run_dir, FILE)}")
    try:
        content = read_json(file, run_dir, most=MAX_BYTES)
        found, frozen = content["recipe"], _frozen_hashes(content)
    except (ValueError, KeyError, TypeError) as error:
        said = one_line(error).removeprefix(f"{file} ")
        fix = "restore it from a copy of the run"
        raise ValueError(f"{file} is not the config of a run ({said}): {fix}") from error
    try:
        recipe = decode(forget_promises(found), "recipe")
    except ValueError as error:
        raise ValueError(f"{file}: {one_line(error)}") from error
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{file} holds a {type(recipe).__name__}, not a Recipe")
    return Resolved(recipe, frozen)


def recipe_from_json(text: str) -> Recipe:
    """Read the recipe that `serialize.to_json` wrote.

    Raises:
      ValueError: it is not a recipe, or holds a class or field that this version does not know.
    """
    recipe = from_json(text)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"expected a Recipe, got a {type(recipe).__name__}")
    return recipe


def _frozen_hashes(content: dict[str, Any]) -> dict[str, str]:
    """Return hashes by name. A hash names a folder, so nothing else than hex digits passes.

    Runs from before frozen trees had names say "frozen_hash", of an entropy model or null.
    """
    if "frozen" in content:
        frozen = content["frozen"]
    else:
        frozen = {} if content["frozen_hash"] is None else {ENTROPY: content["frozen_hash"]}
    if not isinstance(frozen, dict) or not all(_names_a_tree(*entry) for entry in frozen.items()):
        raise ValueError(f"frozen is {frozen!r:.80}, expected SHA-256 content hashes in hex by name")
    return frozen


def _names_a_tree(name: Any, content_hash: Any) -> bool:
    is_hash = isinstance(content_hash, str) and HASH.fullmatch(content_hash) is not None
    return is_hash and isinstance(name, str) and NAME.fullmatch(name) is not None


def continued(run_dir: str | os.PathLike[str]) -> Resolved:
    """Read what `write_resolved` wrote in a folder that holds checkpoints.

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


def adopt(
    recipe: Recipe,
    stored: Resolved,
    *,
    resume_with: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
) -> Recipe:
    """Give `recipe` what the run in progress has settled already: entropy model, threshold and capacity.

    Fields of `FREE` may differ from the run's; those of `FIXED` may not. All others decide what is learned: data,
    optimiser, seed, length, batch, precision, the start of the run. They differ only if `resume_with` says that they
    are meant to. An error names `run_dir`, where `stored` was read.

    Raises:
      ValueError: another field differs; all are named with both values, one a line where they are long.
    """
    folder = "the folder" if run_dir is None else f"{str(run_dir)!r}"
    old = stored.recipe
    recipe = dataclasses.replace(_settle(recipe, old), entropy_model=old.entropy_model)
    if recipe.reference is not None and old.reference is not None:
        reference = dataclasses.replace(recipe.reference, model=old.reference.model)
        recipe = dataclasses.replace(recipe, reference=reference)
    changed = learned_changes(old, recipe)
    if fixed := [change for change in changed if _is_in(change, FIXED)]:
        raise ValueError(
            f"{folder} holds a run of another recipe; use another folder (and init_from, to start from its "
            f"parameters), or undo these changes:{list_changes(fixed)}"
        )
    if changed and not resume_with:
        raise ValueError(
            f"{folder} holds a run with other settings; use another folder, or undo these changes, or say with "
            f"--resume-with (of jaxblt train; resume_with=True of fit) that they are meant:{list_changes(changed)}"
        )
    return recipe


def learned_changes(old: Recipe, new: Recipe) -> list[str]:
    """Return the fields in which two recipes learn something else, one "path: old -> new" each: all not `FREE`."""
    names = [field.name for field in dataclasses.fields(Recipe)]
    found = [d for name in names for d in differences(getattr(old, name), getattr(new, name), name)]
    return [change for change in found if not _is_in(change, FREE)]


def list_changes(changes: list[str]) -> str:
    """Return changes as the end of an error, with long values shortened: in its line if they fit, else one a line."""
    short = [_shortened(change) for change in changes]
    line = ", ".join(short)
    return f" {line}" if len(line) <= LINE else "".join(f"\n  {change}" for change in short)


def _shortened(change: str) -> str:
    path, _, values = change.partition(": ")
    old, arrow, new = values.partition(" -> ")
    short = [value if len(value) <= VALUE else f"{value[: VALUE - 3]}..." for value in (old, new)]
    return f"{path}: {arrow.join(short)}"


def _is_in(change: str, paths: tuple[str, ...]) -> bool:
    changed = change.partition(":")[0]
    return any(changed == path or changed.startswith((f"{path}.", f"{path}[")) for path in paths)


def inherit(recipe: Recipe, run_dir: str | os.PathLike[str]) -> Recipe:
    """Give `recipe` threshold and capacity of the run whose parameters it starts from, where it leaves them open.

    Both must cut by the same rule and the same entropy model. The parameters then go on reading the patches that they
    learned to read. Another sample of the data would calibrate a slightly different threshold.

    Raises:
      FileNotFoundError: the folder holds no run.
      ValueError: its config cannot be read.
    """
    old = read_resolved(run_dir).recipe
    return _settle(recipe, old) if has_rule_of(recipe, old) else recipe


def _settle(recipe: Recipe, old: Recipe) -> Recipe:
    patcher = recipe.patcher
    if patcher is None or old.patcher is None:
        return recipe
    missing = [name for name in CALIBRATED if getattr(patcher, name) is None]
    if patcher.threshold not in (None, old.patcher.threshold):
        missing = [name for name in missing if name != "margin"]  # of the other threshold
    settled = {name: getattr(old.patcher, name) for name in missing}
    return dataclasses.replace(recipe, patcher=dataclasses.replace(patcher, **settled))


def has_rule_of(recipe: Recipe, old: Recipe) -> bool:
    """Return whether two recipes cut bytes by one rule and one entropy model, whatever was calibrated."""
    return _rule(recipe) == _rule(old)


def _rule(recipe: Recipe) -> tuple[Any, ...]:
    """Return how a recipe's bytes are cut, without what is calibrated."""
    patcher = recipe.patcher
    if patcher is not None:
        patcher = dataclasses.replace(patcher, **dict.fromkeys(CALIBRATED))
    return patcher, recipe.bytes_per_patch, recipe.entropy_run


def run_files(run_dir: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the files and folders that a run is read from: what an answer about it must not overwrite."""
    return tuple(os.path.join(run_dir, name) for name in (FILE, CHECKPOINTS, FROZEN))


def checkpoint_dir(run_dir: str | os.PathLike[str]) -> Path:
    """Return where a run keeps its checkpoints."""
    return Path(run_dir) / CHECKPOINTS
