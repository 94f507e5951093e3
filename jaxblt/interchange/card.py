"""Model cards: what a run is, what it was trained on, and how good it is, as Markdown."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from jaxblt.boxed import boxed, is_boxed
from jaxblt.data.config import DataConfig
from jaxblt.evaluation import format_table
from jaxblt.precision.weights import Quantized, is_stored
from jaxblt.training.flops import count_params
from jaxblt.training.log.runlog import read_metrics
from jaxblt.training.stored.remote_run import readable

if TYPE_CHECKING:
    from jaxblt.run import Run

VALIDATED = "validation/bits_per_byte"
"""The figure of the log that a card shows where nothing better is said."""


def make_card(
    run_dir: str | os.PathLike[str],
    *,
    step: int | Literal["best"] | None = None,
    licence: str = "",
    limits: str = "",
) -> str:
    """Return the card of a run: model, data, training, and figures with baselines where there are any.

    Args:
      run_dir: folder of the run, or the name of one that comes with jaxblt.
      step: of the checkpoint that it is about; None for the newest, "best" for that of the best evaluation.
      licence: of the data, in a sentence.
      limits: what the run is not for, in a sentence.

    Raises:
      FileNotFoundError: there is no such run or step.
    """
    from jaxblt.run import load

    about = boxed()[str(run_dir)] if is_boxed(run_dir) else {}
    run = load(run_dir, step=step)
    with readable(run_dir, "none") as folder:
        return "\n".join(_lines(run, folder, {"licence": licence, "limits": limits, **about})) + "\n"


def _lines(run: "Run", folder: Path, about: dict[str, Any]) -> Iterator[str]:
    recipe, (params, without) = run.recipe, count_params(run.params)
    yield from (
        f"# {recipe.name}",
        "",
        about.get("title", f"A run of jaxblt: {type(recipe.model).__name__}."),
    )
    tables = f", {params - without:,} of them in hash tables" if params > without else ""
    yield from ("", "## Model", "", f"- {type(recipe.model).__name__}, {params:,} parameters{tables}")
    leaves = jax.tree.leaves(run.params, is_leaf=is_stored)
    schemes = sorted({leaf.scheme for leaf in leaves if isinstance(leaf, Quantized)})
    if schemes:
        yield f"- kernels of products in {', '.join(schemes)}"
    if run.patcher is not None:
        yield f"- patches: mode {run.patcher.mode}, threshold {run.patcher.threshold}"
    yield from ("", "## Data", "", f"- {about.get('data', _data(recipe.data))}")
    yield from (f"- licence: {about[name]}" for name in ("licence",) if about[name])
    train = recipe.train
    yield from ("", "## Training", "")
    kind = type(recipe.optimizer).__name__
    yield f"- {run.step:,} of {train.steps:,} steps, seed {train.seed}, {train.dtype}, {kind}"
    yield from (f"- {line}" for line in about.get("training", _machine(folder)))
    rows = about.get("figures") or _last_evaluation(folder, run.step)
    if rows:
        yield from ("", "## Figures", "", format_table(("what", "figure"), rows, style="markdown"))
    if about["limits"]:
        yield from ("", "## Not for", "", about["limits"])


def _data(data: Any) -> str:
    if isinstance(data, DataConfig):
        named = ", ".join(data.paths) or data.sample or "several sources"
        return f"{named}, split by {data.split}, rows of {data.seq_len:,}"
    return type(data).__name__


def _machine(folder: Path) -> Iterator[str]:
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    devices = told.get("devices") or {}
    if devices:
        yield f"{devices.get('count')} x {devices.get('kind')}, jax {told['versions']['jax']}"


def _last_evaluation(folder: Path, step: int) -> list[tuple[str, float]]:
    """Return the figure of the last evaluation up to a step."""
    file = folder / "metrics.jsonl"
    lines = read_metrics(file) if file.exists() else []
    found = [line for line in lines if VALIDATED in line and line["step"] <= step]
    return [("validation, bits per byte", found[-1][VALIDATED])] if found else []
