"""Runs on one task side by side: python -m experiments.benchmark tasks RUN_DIR ... --out FILE."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from jaxblt.run import Run

SAMPLE = 2000
"""Examples of drawn tasks that the majority's answers are counted and scored on, of each split."""
MOST = 200_000
"""Examples of a task that ends, at most; there are more where expressions are shown in several orders."""


def tasks(
    run_dirs: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: str,
    split: Literal["validation", "test"] = "test",
    max_batches: int | None = None,
) -> dict[str, Any]:
    """Score runs on their task, with what their training took and the majority's answers.

    Args:
      run_dirs: folders of runs, such as one of a recipe and its Transformer.
      out: file for the figures as JSON, written anew after each run.
      split: that is scored.
      max_batches: score so many, evenly spread over the split; all by default.

    Raises:
      ValueError: a run learned no task, two runs learned different ones, or there is no run.
    """
    import jaxblt
    from experiments.benchmark.figures.saved import save
    from jaxblt.evaluation.tasks import majority_baseline

    if not run_dirs:
        raise ValueError("there is nothing to score: name folders of runs")
    loaded = [jaxblt.load(folder) for folder in run_dirs]
    learned = {task_of(run) for run in loaded}
    if len(learned) > 1:
        raise ValueError(f"runs are compared on one task, these learned {learned}: score them apart")
    (task,) = learned
    drawn = task.open("train").count is None
    majority = majority_baseline(task, split, most=SAMPLE if drawn else MOST).figures()
    figures: dict[str, Any] = {
        "task": type(task).__name__,
        "split": split,
        "majority": majority,
        "runs": [],
    }
    for folder, run in zip(run_dirs, loaded, strict=True):
        figures["runs"].append(
            {"run": folder, **taken(run, folder), "scores": scores(run, split, max_batches)}
        )
        save("tasks", out, figures)
    return figures


def task_of(run: "Run") -> Any:
    """Return the task that a run learned.

    Raises:
      ValueError: it learned none.
    """
    from jaxblt.data import TaskDataConfig

    data = run.recipe.data
    if not isinstance(data, TaskDataConfig):
        raise ValueError(f"run {run.recipe.name!r} learned no task: its data is a {type(data).__name__}")
    return data.task


def scores(run: "Run", split: Literal["validation", "test"], max_batches: int | None) -> dict[str, float]:
    """Return accuracy, by subtask too if answers are ids; of runs on labels what their objective tells."""
    from jaxblt.evaluation.tasks.evaluate import score_run

    if run.recipe.data.labels is not None:
        return run.evaluate(split, max_batches=max_batches)
    return score_run(run, split, max_batches=max_batches).figures()


def taken(run: "Run", folder: str) -> dict[str, Any]:
    """Return the model's size, and steps, tokens and minutes of its training, all processes of the run together."""
    from jaxblt.training.flops import count_params
    from jaxblt.training.log.runlog import read_metrics

    model: Any = run.recipe.model
    log = [line for line in read_metrics(Path(folder) / "metrics.jsonl") if "seconds" in line]
    seconds = [line["seconds"] for line in log if line["step"] <= run.step]
    return {
        "pattern": model.stack.pattern,
        "parameters": count_params(run.params)[0],
        "step": run.step,
        **tokens_read(run),
        "minutes": seconds[-1] / 60 if seconds else None,
    }


def tokens_read(run: "Run") -> dict[str, int | None]:
    """Count positions of the batches up to the run's step, and those that held a token; None for drawn examples."""
    from jaxblt.data import make_dataset

    data: Any = make_dataset(run.recipe.data, split="train", mode="train")
    begun: list[list[int]] = [[] for _ in data.row_lengths]
    for place in map(data.schedule.place, range(run.step)):
        begun[place.bucket].append(place.sample)
    rows = [len(first) * size for first, size in zip(begun, data.batch_sizes, strict=True)]
    positions = sum(count * length for count, length in zip(rows, data.row_lengths, strict=True))
    if data.examples.lengths is None:
        return {"positions": positions, "tokens": None}
    return {
        "positions": positions,
        "tokens": sum(_tokens(data, bucket, sorted(first)) for bucket, first in enumerate(begun)),
    }


def _tokens(data: Any, bucket: int, first: list[int]) -> int:
    """Count tokens of a bucket's batches that begin at these samples.

    An epoch holds every row once, so it is counted at once where all of its batches were read.
    """
    import numpy as np

    from jaxblt.data.schedule import Place

    size = data.batch_sizes[bucket]
    examples = data.indexes[bucket].documents if data.indexes else np.arange(data.examples.count)
    lengths = data.examples.lengths[examples]
    in_order = next((n for n, sample in enumerate(first) if sample != n * size), len(first))
    epochs = in_order * size // len(lengths)
    samples = (sample + slot for sample in first[epochs * len(lengths) // size :] for slot in range(size))
    numbers = [data.schedule.row(Place(bucket, s), 0) for s in samples if s >= epochs * len(lengths)]
    return epochs * int(lengths.sum()) + int(lengths[np.array(numbers, np.int64)].sum())
