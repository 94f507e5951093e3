"""Several runs of one kind, one folder each, and a table of what came out."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from jaxblt.data.sources import DocumentSource
from jaxblt.remote import refuse_remote
from jaxblt.text_table import format_table
from jaxblt.training.best import followed, is_better_higher
from jaxblt.training.log.health import TrainingFailed
from jaxblt.training.log.runlog import read_metrics
from jaxblt.training.loop import fit
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.setup import open_data
from jaxblt.training.stored.checkpoint import list_steps
from jaxblt.training.stored.resolved import FILE, adopt, checkpoint_dir, read_resolved
from jaxblt.training.stored.safe_files import one_line, replace_text

logger = logging.getLogger(__name__)

TABLE = "sweep"
"""Name of the table's files in the folder of a sweep, without .json and .tsv."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
      name: of its folder.
      recipe: what it trains.
      changes: what is its own, by option, for the table.
    """

    name: str
    recipe: Recipe
    changes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
      name, changes: of the trial.
      status: "finished", "stopped", "waiting", or why it failed.
      step: steps taken.
      best, best_step: the best value of the chosen metric, and the step of it; None if it was not logged.
      last: the last value.
      seconds: of training.
    """

    name: str
    changes: Mapping[str, str]
    status: str
    step: int
    best: float | None
    best_step: int | None
    last: float | None
    seconds: float | None


@dataclass(frozen=True)
class Ranking:
    """By which figure of the run log runs are compared.

    Attributes:
      metric: its name in `metrics.jsonl`, such as "validation/bits_per_byte".
      higher: whether a higher one is better.
    """

    metric: str
    higher: bool

    def best(self, values: Mapping[int, float]) -> tuple[int, float] | None:
        """Return the step and value of the best of some values by step; the earliest of equal ones."""
        if not values:
            return None
        step = min(values, key=lambda step: (self.key(values[step]), step))
        return step, values[step]

    def key(self, value: float | None) -> tuple[bool, float]:
        """Sort better values first, and missing ones last."""
        if value is None or math.isnan(value):
            return True, 0.0
        return False, -value if self.higher else value


def default_ranking(
    recipe: Recipe, metric: str | None, order: Literal["lowest", "highest"] | None
) -> Ranking:
    """Rank by a metric, or else by the validation figure that a run is judged by, in the direction of `HIGHER`.

    Raises:
      ValueError: the recipe evaluates never, or keeps no log that could be read.
    """
    if "jsonl" not in recipe.train.trackers:
        raise ValueError(
            f"runs are compared by metrics.jsonl: add jsonl to train.trackers = {recipe.train.trackers}"
        )
    metric = f"validation/{followed(recipe)[0]}" if metric is None else metric
    if metric.startswith("validation/") and not recipe.train.eval_every:
        raise ValueError(
            f"runs cannot be compared by {metric}: train.eval_every is 0; set it, or name another metric"
        )
    return Ranking(metric, is_better_higher(metric) if order is None else order == "highest")


def check_trials(trials: Sequence[Trial], folder: Path, *, source: DocumentSource | None = None) -> None:
    """Raise ValueError (or FileNotFoundError) naming the first run that could not begin; nothing is written.

    Looks at names, devices, data and what the folders of runs hold already.
    """
    refuse_remote("folder", folder)
    names = [trial.name for trial in trials]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two runs of the sweep are called {doubled[0]!r}: leave one of them out")
    seen: list[Any] = []
    for trial in trials:
        recipe, run_dir = trial.recipe, folder / trial.name
        try:
            if (run_dir / FILE).exists():
                adopt(recipe, read_resolved(run_dir), run_dir=run_dir)
            key = recipe.data, recipe.mesh, recipe.train.accumulate, recipe.patcher
            if key not in seen:
                open_data(recipe, recipe.mesh.build(), source=source)
                seen.append(key)
        except (ValueError, OSError) as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
            raise kind(f"run {trial.name}: {one_line(error)}") from error


def sweep(
    trials: Sequence[Trial],
    folder: str | os.PathLike[str],
    ranking: Ranking,
    *,
    source: DocumentSource | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Train one run after the other, each in a folder of its own, and keep a table of all beside them.

    A run that is finished is not run again, and one that was stopped goes on. A run that fails, by whatever error, does
    not keep others from running: the table has its error. A signal ends the sweep after it ended the run.

    Args:
      trials: the runs.
      folder: of the sweep, with a folder for each run, `sweep.json` and `sweep.tsv`.
      ranking: how runs are compared.
      source: documents to use instead of those that the recipes name.
      say: is told in a line which run begins, and which fails.

    Returns:
      The outcomes, best first.

    Raises:
      ValueError: a run could not begin; then none did.
    """
    folder = Path(folder)
    check_trials(trials, folder, source=source)
    outcomes = {trial.name: outcome_of(trial, folder, ranking) for trial in trials}
    for number, trial in enumerate(trials, start=1):
        if outcomes[trial.name].status != "finished":
            say(f"run {number} of {len(trials)}: {trial.name}")
            status = _train(trial, folder / trial.name, source)
            if status.startswith("failed"):
                say(f"run {trial.name} {status}")
            outcomes[trial.name] = outcome_of(trial, folder, ranking, status)
            jax.clear_caches()  # programs of one run are of no use to the next
        ranked = sorted(outcomes.values(), key=lambda one: ranking.key(one.best))
        write_table(folder, ranked, ranking)
        if outcomes[trial.name].status == "stopped":
            break
    return sorted(outcomes.values(), key=lambda one: ranking.key(one.best))


def _train(trial: Trial, run_dir: Path, source: DocumentSource | None) -> str:
    try:
        fitted = fit(trial.recipe, run_dir, source=source)
    except TrainingFailed as error:
        return f"failed: {one_line(error)}"
    except Exception as error:
        logger.info("run %s failed", trial.name, exc_info=error)
        return f"failed: {type(error).__name__}: {one_line(error)}"
    return "finished" if fitted.finished else "stopped"


def outcome_of(trial: Trial, folder: Path, ranking: Ranking, status: str | None = None) -> Outcome:
    """Read what the folder of a run tells; without `status`, whether its last step was taken."""
    run_dir = folder / trial.name
    step = max(list_steps(checkpoint_dir(run_dir)), default=0)
    if status is None:
        status = "finished" if step >= trial.recipe.train.steps else "waiting"
    log = run_dir / "metrics.jsonl"
    lines = list(read_metrics(log)) if log.exists() else []
    values = {line["step"]: float(line[ranking.metric]) for line in lines if ranking.metric in line}
    best_step, best = ranking.best(values) or (None, None)
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    last = values[max(values)] if values else None
    took = seconds[-1] if seconds else None
    return Outcome(trial.name, dict(trial.changes), status, step, best, best_step, last, took)


def table_of(outcomes: Sequence[Outcome], ranking: Ranking, *, digits: int = 4) -> str:
    """Write the outcomes as a table of text."""
    headers = ("run", "status", "step", f"best {ranking.metric}", "at step", "last", "seconds")
    rows = [
        (o.name, o.status.partition(":")[0], o.step, o.best, o.best_step, o.last, o.seconds) for o in outcomes
    ]
    return format_table(headers, rows, digits=digits)


def write_table(folder: Path, outcomes: Sequence[Outcome], ranking: Ranking) -> None:
    """Write `sweep.json` and `sweep.tsv`, best run first; one process does."""
    if jax.process_index() != 0:
        return
    content: dict[str, Any] = {"metric": ranking.metric, "order": "highest" if ranking.higher else "lowest"}
    content["runs"] = [asdict(outcome) for outcome in outcomes]
    options = list(dict.fromkeys(option for outcome in outcomes for option in outcome.changes))
    figures = ("status", "step", "best", "best_step", "last", "seconds")
    lines: list[tuple[str, ...]] = [("run", *options, *figures)]
    for outcome in outcomes:
        own = [outcome.changes.get(option, "") for option in options]
        told = ["" if getattr(outcome, name) is None else str(getattr(outcome, name)) for name in figures]
        lines.append((outcome.name, *own, *told))
    replace_text(folder / f"{TABLE}.json", json.dumps(content, indent=2) + "\n")
    replace_text(folder / f"{TABLE}.tsv", "".join("\t".join(line) + "\n" for line in lines))
