"""Scores a run on a split of its data or of its task: jaxblt evaluate RUN_DIR [--split test]."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxblt.cli.mesh import parse_mesh
from jaxblt.cli.parsing import parse
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.splits import SplitName
from jaxblt.data.task_data import TaskDataConfig
from jaxblt.remote import refuse_remote
from jaxblt.training.state import Weights
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jaxblt.run import Run


def evaluate(
    run_dir: Annotated[str, tyro.conf.Positional],
    split: Literal["train", "validation", "test", "all"] = "test",
    context: int | None = None,
    seq_len: int | None = None,
    targets: str | None = None,
    max_batches: int | None = None,
    mesh: str | None = None,
    recalibrate: bool = False,
    weights: Weights | None = None,
    step: int | Literal["best"] | None = None,
    predictions: str | None = None,
    out: str | None = None,
) -> dict[str, float]:
    """Bits per byte of a run's newest checkpoint: Σ log-loss / Σ bytes, every byte of the split scored once.

    For a run on a task also its accuracy over answers, the exact match of whole examples, both by subtask, and the
    accuracy of always giving the commonest answer.

    Args:
      run_dir: folder of the run.
      split: of the run's data.
      context: bytes that precede the scored ones of a window, wherever there are as many; half a row by default.
      seq_len: bytes of a row; the recipe's by default.
      targets: characters, such as ACGT, to score apart as well; the log-loss is still over the whole vocabulary.
      max_batches: score so many, evenly spread over the split; all by default.
      mesh: sizes of the mesh axes, such as "seq=4,data=2"; the devices left share the rows.
      recalibrate: give blocks of patches as many slots as the split asks for; the threshold stays.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.
      predictions: of a run on labels, file for name, label, probabilities and prediction of each record.
      out: file for the figures as JSON.

    Raises:
      ValueError: an option is out of range, or does not go with the run's data or the devices.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than the split asks for.
    """
    import jaxblt
    from jaxblt.parallel import MeshConfig

    _check_numbers({"--context": (context, 0), "--seq-len": (seq_len, 1), "--max-batches": (max_batches, 1)})
    if targets == "":
        raise ValueError("--targets is empty: name characters such as ACGT, or leave it out")
    if out is not None:
        refuse_remote("--out", out)
    loaded = jaxblt.load(run_dir, step=step, weights=weights)
    _check_kind(loaded, targets=targets, predictions=predictions)
    length = loaded.recipe.data.seq_len if seq_len is None else seq_len
    data = loaded.recipe.data
    if data.packing == "windows":
        data = replace(data, seq_len=length, stride=None, context=length // 2 if context is None else context)
    elif seq_len is not None or context is not None:
        raise ValueError(
            f"--seq-len and --context are of windows, and the run's data.packing is {data.packing!r}: leave them out"
        )
    if recalibrate:
        loaded = loaded.recalibrate(data, split=split)
    spread = parse_mesh(mesh or "", MeshConfig())
    found = loaded.evaluate(split, data=data, targets=targets, max_batches=max_batches, mesh=spread)
    if isinstance(data, TaskDataConfig):
        found |= _task_figures(loaded, data, split, max_batches)
    if predictions is not None:
        write_predictions(loaded, split, predictions)
    figures = {"run": loaded.recipe.name, "step": loaded.step, "split": split, "seq_len": length, **found}
    if loaded.patcher is not None:
        figures |= {
            "capacity": loaded.patcher.slots,
            "threshold": loaded.threshold,
            "margin": loaded.patcher.margin,
        }
    print(json.dumps(figures, indent=2))
    if out is not None:
        Path(out).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return found


def _check_numbers(options: Mapping[str, tuple[int | None, int]]) -> None:
    """Raises ValueError for an option below its least value."""
    for name, (value, least) in options.items():
        if value is not None:
            whole(name, value, least=least)


def _task_figures(
    run: "Run", data: TaskDataConfig, split: SplitName, max_batches: int | None
) -> dict[str, float]:
    """Accuracy over answers and examples, by subtask, unless rows have labels; and that of the commonest answer."""
    from jaxblt.evaluation.tasks import majority_baseline
    from jaxblt.evaluation.tasks.evaluate import score_run

    majority = {"majority_accuracy": majority_baseline(data.task, split).figures()["accuracy"]}
    if data.labels is not None:
        return majority
    return score_run(run, split, max_batches=max_batches).figures() | majority


def _check_kind(run: "Run", *, targets: str | None, predictions: str | None) -> None:
    """Raises ValueError for an option of runs that predict something else."""
    is_labelled = isinstance(run.recipe.data, LabelledDataConfig)
    if is_labelled and targets is not None:
        raise ValueError(
            f"--targets {targets} is of runs that predict bytes, and this one predicts labels: leave it out"
        )
    if predictions is not None and not is_labelled:
        raise ValueError(
            f"--predictions {predictions} is of runs that predict labels, and this one predicts bytes: leave it out"
        )


def write_predictions(run: "Run", split: SplitName, file: str) -> None:
    """What a run says of each labelled record of a split, beside its label, as tab-separated values."""
    from jaxblt.data.labelled import LabelledDataset
    from jaxblt.data.pipeline import make_dataset

    data = make_dataset(run.recipe.data, split=split, mode="eval")
    assert isinstance(data, LabelledDataset)
    run.classify(data.source).with_labels(data.records).to_tsv(file)


def main(argv: Sequence[str]) -> None:
    """Parses and scores."""
    parse(evaluate, argv, prog="jaxblt evaluate")
