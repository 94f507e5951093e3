"""Scores a run on a split of its data, on its task or on files: jaxblt evaluate RUN_DIR [--files FILE]."""

import glob
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jaxblt.cli.evaluation_data import Evaluated, find_data
from jaxblt.cli.label_comparison import compare, is_comparable
from jaxblt.cli.mesh import asked_mesh
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.splits import SplitName
from jaxblt.data.task_data import TaskDataConfig
from jaxblt.outputs import check_output, write_text
from jaxblt.training.state import Step, Weights
from jaxblt.training.stored.resolved import run_files
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jaxblt.parallel import MeshConfig
    from jaxblt.run import Run


def evaluate(
    run_dir: Annotated[str, tyro.conf.Positional],
    split: Literal["train", "validation", "test", "all"] | None = None,
    files: tuple[str, ...] = (),
    labels: str | None = None,
    context: int | None = None,
    seq_len: int | None = None,
    targets: str | None = None,
    max_batches: int | None = None,
    mesh: str | None = None,
    recalibrate: bool = False,
    weights: Weights | None = None,
    step: Step | None = None,
    predictions: str | None = None,
    baselines: bool = True,
    out: str | None = None,
    overwrite: bool = False,
    trust_sources: bool = False,
) -> dict[str, float]:
    """Print bits per byte of a run's newest checkpoint: Σ log-loss / Σ bytes.

    Every byte of the split is scored once. For a run on a task also its accuracy over answers and the exact match of
    whole examples, both by subtask. Beside them stands the accuracy of always giving the commonest answer.

    Args:
      run_dir: folder of the run.
      split: of the run's data, the test split by default; of --files all by default.
      files: FASTA (by its ending), JSON lines (.jsonl) or text to score instead of the run's data; of a run on labels
        files of labelled records.
      labels: table of the labels of --files, where they are FASTA.
      context: bytes that precede the scored ones of a window, wherever there are as many; half a row by default.
      seq_len: bytes of a row; the recipe's by default.
      targets: characters, such as ACGT, to score apart as well; the log-loss is still over the whole vocabulary.
      max_batches: score so many, evenly spread over the split; all by default.
      mesh: sizes of the mesh axes, such as "seq=4,data=2"; the devices left share the rows.
      recalibrate: give blocks of patches as many slots as the split asks for, learned ones the run's mean length.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.
      predictions: of a run on labels, file for name, label, probabilities and prediction of each record.
      baselines: of a run on classes or numbers, score simple models on the test split too, and say if one is ahead.
      out: file for the figures as JSON.
      overwrite: replace OUT and PREDICTIONS if they are there.
      trust_sources: fetch URLs that the run's config names; a run of a stranger may name any. Local paths are read.

    Raises:
      FileNotFoundError: a file is not there; paths in a run from elsewhere are those of another machine.
      ValueError: an option is out of range, or does not go with the run's data or the devices.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than the split asks for.
    """
    import jaxblt

    _check_numbers({"--context": (context, 0), "--seq-len": (seq_len, 1), "--max-batches": (max_batches, 1)})
    if targets == "":
        raise ValueError("--targets is empty: name characters such as ACGT, or leave it out")
    outputs = {"--out": out, "--predictions": predictions}
    _check_outputs(outputs, (*run_files(run_dir), *files), overwrite)
    loaded = jaxblt.load(run_dir, step=step, weights=weights)
    _check_kind(loaded, targets=targets, predictions=predictions)
    asked = find_data(loaded.recipe.data, files, labels, split, {"seq_len": seq_len, "context": context})
    _check_outputs(outputs, _local_files(asked.data), overwrite)
    found, loaded = _figures(
        loaded, asked, trust_sources, mesh, recalibrate, targets=targets, max_batches=max_batches
    )
    if predictions is not None:
        write_predictions(loaded, asked, predictions)
    figures = {"run": loaded.recipe.name, "step": loaded.step, "split": asked.split}
    figures |= {"seq_len": asked.data.seq_len, **found}
    if loaded.patcher is not None:
        figures |= {
            "capacity": loaded.patcher.slots,
            "threshold": loaded.threshold,
            "margin": loaded.patcher.margin,
        }
    figures |= _beside(asked, found) if baselines and not files else {}
    print(json.dumps(figures, indent=2))
    if out is not None:
        write_text(out, json.dumps(figures, indent=2) + "\n")
    return found


def _beside(asked: Evaluated, found: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of baselines on a test split of one label a record, and print what they say of the run."""
    if asked.split != "test" or not is_comparable(asked.data):
        return {}
    comparison = compare(asked.data, found)
    print("\n".join(comparison.lines), file=sys.stderr)
    return {"baselines": comparison.baselines}


def _figures(
    run: "Run", asked: Evaluated, trust_sources: bool, mesh: str | None, recalibrate: bool, **options: Any
) -> tuple[dict[str, float], "Run"]:
    """Return the figures of a run on data, and the run with the capacity used for them."""
    from jaxblt.parallel import MeshConfig

    data, split, source = asked
    spread = asked_mesh(mesh) or MeshConfig()
    given: dict[str, Any] = {"data": data, "source": source, "trust_sources": trust_sources}
    try:
        if recalibrate:
            run = run.recalibrate(split=split, **given)
        found = run.evaluate(split, mesh=spread, **given, **options)
    except FileNotFoundError as error:
        if source is not None:
            raise
        raise FileNotFoundError(
            f"{error}; the run's config names it, maybe on another machine: name files of this one with --files"
        ) from error
    if isinstance(data, TaskDataConfig):
        found |= _task_figures(run, data, split, options["max_batches"], spread)
    return found, run


def _local_files(data: Any) -> list[str]:
    """Return the files of labelled records or documents, where they lie on this machine."""
    patterns = [*getattr(data, "paths", ()), *(p for s in getattr(data, "sources", ()) for p in s.paths)]
    patterns += [data.labels] if isinstance(getattr(data, "labels", None), str) else []
    return [file for pattern in patterns for file in glob.glob(os.path.expanduser(pattern))]


def _check_outputs(outputs: Mapping[str, str | None], inputs: Sequence[str], overwrite: bool) -> None:
    """Raise ValueError or FileExistsError for a file that cannot be written.

    See `check_output`.
    """
    for option, path in outputs.items():
        if path is not None:
            check_output(option, path, inputs=inputs, overwrite=overwrite)


def _check_numbers(options: Mapping[str, tuple[int | None, int]]) -> None:
    """Raise ValueError for an option below its least value."""
    for name, (value, least) in options.items():
        if value is not None:
            whole(name, value, least=least)


def _task_figures(
    run: "Run", data: TaskDataConfig, split: SplitName, max_batches: int | None, mesh: "MeshConfig"
) -> dict[str, float]:
    """Return accuracy over answers and examples, and that of the commonest answer.

    Unless rows have labels it is given by subtask, too.
    """
    from jaxblt.evaluation.tasks import majority_baseline
    from jaxblt.evaluation.tasks.evaluate import score_run

    majority = {"majority_accuracy": majority_baseline(data.task, split).figures()["accuracy"]}
    if data.labels is not None:
        return majority
    return score_run(run, split, max_batches=max_batches, mesh=mesh).figures() | majority


def _check_kind(run: "Run", *, targets: str | None, predictions: str | None) -> None:
    """Raise ValueError for an option of runs that predict something else."""
    is_labelled = isinstance(run.recipe.data, LabelledDataConfig)
    if is_labelled and targets is not None:
        raise ValueError(
            f"--targets {targets} is of runs that predict bytes, and this one predicts labels: leave it out"
        )
    if predictions is not None and not is_labelled:
        raise ValueError(
            f"--predictions {predictions} is of runs that predict labels, and this one predicts bytes: leave it out"
        )


def write_predictions(run: "Run", asked: Evaluated, file: str) -> None:
    """Write what a run says of each labelled record, beside its label, as tab-separated values."""
    from jaxblt.data.labelled import LabelledDataset
    from jaxblt.data.pipeline import make_dataset

    data = make_dataset(asked.data, split=asked.split, mode="eval")
    assert isinstance(data, LabelledDataset)
    run.classify(data.source).with_labels(data.records).to_tsv(file)
