"""Answers on facts scattered over longer texts: python -m experiments.benchmark babilong RUN_DIR ... --out FILE."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from jaxblt.run import Run

BYTES_AT_ONCE = 2**17
"""Rows of a batch hold no more, if there are two of them."""


def babilong(
    run_dirs: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: str,
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 131_072, 1_048_576),
    rows: int = 200,
) -> dict[str, Any]:
    """Score runs of the recipe `babilong` on test stories in test books.

    Lengths go beyond those of training.

    Args:
      run_dirs: folders of runs, such as one with a memory and one of only windows.
      out: file for the figures as JSON, written anew after each length.
      lengths: bytes of a row; every row has as many, except for the end of its last sentence.
      rows: of each length.

    Raises:
      ValueError: a run learned another task, two runs learned different ones, or there is no run or no row.
    """
    import jaxblt
    from experiments.benchmark.figures.saved import save
    from jaxblt.evaluation.tasks import majority_baseline

    if not run_dirs or not lengths or rows < 1:
        raise ValueError(f"there is nothing to score: {len(run_dirs)} runs, lengths {lengths}, {rows} rows")
    loaded = [jaxblt.load(folder) for folder in run_dirs]
    tasks = {at_length(run, lengths[0], rows).task for run in loaded}
    if len(tasks) > 1:
        raise ValueError(f"runs are compared on one task, these learned {tasks}: score them apart")
    figures: dict[str, Any] = {"task": tasks.pop().task, "rows": rows, "majority": {}, "runs": []}
    for folder, run in zip(run_dirs, loaded, strict=True):
        stack: Any = run.recipe.model
        named = {"run": Path(folder).name, "step": run.step, "pattern": stack.stack.pattern, "lengths": []}
        figures["runs"].append(named)
        for length in lengths:
            data = at_length(run, length, rows)
            if str(length) not in figures["majority"]:
                figures["majority"][str(length)] = majority_baseline(data.task).figures()["accuracy"]
            named["lengths"].append(answers(run, data))
            save("babilong", out, figures)
    return figures


def at_length(run: "Run", length: int, rows: int) -> Any:
    """Return the data of a run with so many rows of that length for testing.

    Raises:
      ValueError: it learned another task.
    """
    from jaxblt.data import TaskDataConfig
    from jaxblt.data.tasks import Babilong

    data = run.recipe.data
    if not isinstance(data, TaskDataConfig) or not isinstance(data.task, Babilong):
        raise ValueError(f"run {run.recipe.name!r} learned another task: name runs of the recipe babilong")
    task = replace(data.task, min_bytes=length, max_bytes=length, eval_size=rows)
    batch = min(max(BYTES_AT_ONCE // task.length, 1), rows)
    return replace(data, task=task, seq_len=task.length, batch_size=batch, max_tokens=None)


def answers(run: "Run", data: Any) -> dict[str, Any]:
    """Return the share of right answers, with its Wilson interval."""
    from experiments.benchmark.figures.intervals import wilson
    from jaxblt.data import make_dataset
    from jaxblt.evaluation.tasks import score
    from jaxblt.evaluation.tasks.evaluate import predictor

    found = score(predictor(run), make_dataset(data, split="test", mode="eval"))
    right = round(found.accuracy[0] * found.rows[0])
    low, high = wilson(right, found.rows[0])
    told = {"bytes": data.task.max_bytes, "accuracy": found.accuracy[0], "low": low, "high": high}
    return told | {"right": right, "asked": found.rows[0]}
