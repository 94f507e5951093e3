"""Parts that benchmarks on labelled records share: tables, training to the best validation figure, and who wins."""

import csv
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.data.labelled import LabelledDataConfig
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.train_config import TrainConfig


def new_folder(work: str) -> Path:
    """Make a folder, or take an empty one, which a call without its file leaves behind.

    Raises:
      FileExistsError: it holds something already.
    """
    root = Path(work)
    if root.exists() and any(root.iterdir()):
        raise FileExistsError(f"{work} is there already, and nothing is overwritten: choose another --work")
    root.mkdir(parents=True, exist_ok=True)
    return root


def seeds_of(first: int, count: int) -> range:
    """Return the seeds first, first + 1, ...

    Raises:
      ValueError: there is no seed to train with.
    """
    if count < 1:
        raise ValueError(f"--seeds must be at least 1, got {count}: each network is trained once a seed")
    return range(first, first + count)


def earlier_runs(out: str, figures: dict[str, Any], seeds: range) -> list[dict[str, Any]]:
    """Return runs of other seeds that the file holds already, so that a few seeds can be measured at a time.

    Raises:
      ValueError: they were measured with other settings, on other records, or with one of these seeds.
    """
    if not Path(out).exists():
        return []
    held = json.loads(Path(out).read_text("utf-8"))
    if other := [name for name, value in figures.items() if held.get(name) != json.loads(json.dumps(value))]:
        raise ValueError(f"{out} was measured with other {', '.join(other)}: choose another --out")
    if again := sorted({run["seed"] for run in held["runs"]} & set(seeds)):
        raise ValueError(f"{out} holds runs of seeds {again} already: choose another --first-seed or --out")
    return held["runs"]


def write_records(out: Path, rows: Iterable[tuple[str, str]]) -> None:
    """Write sequences and labels as CSV."""
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("sequence", "label"), *rows])


def data_of(table: Path, seed: int, batch_size: int, *, group_share: float) -> "LabelledDataConfig":
    """Return the table's records, in rows that hold the longest; `seed` picks how groups are dealt 80/10/10."""
    from jaxblt.data.labelled import LabelledDataConfig, fitting_length, with_classes

    groups = {"split": "groups", "group_share": group_share, "split_seed": seed}
    data = LabelledDataConfig(paths=(str(table),), batch_size=batch_size, seed=seed, **groups)
    return with_classes(replace(data, seq_len=fitting_length(data)))


def score_baselines(data: "LabelledDataConfig", longest: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return what needs no neural network on the same split, a dict each, with the seconds of all of them."""
    from jaxblt.evaluation.label_baselines import label_baselines, read_split

    begun = time.perf_counter()
    found = label_baselines(read_split(data), longest=longest)
    seconds = time.perf_counter() - begun
    runs = [
        {"model": name, "seed": data.seed, **scored, "seconds": seconds} for name, scored in found.items()
    ]
    return [*runs, score_start(data)]


def score_start(data: "LabelledDataConfig") -> dict[str, Any]:
    """Return the figures of the regression on words that a fine-tuned model starts as, model "start"."""
    from jaxblt.evaluation.label_baselines import score_classes
    from jaxblt.training.finetune import words_of
    from jaxblt.training.start.word_regression import answer_test

    begun, words = time.perf_counter(), words_of(data)
    assert words is not None
    found = score_classes(*answer_test(data, words, len(data.classes)))
    return {
        "model": "start",
        "seed": data.seed,
        **found,
        "k": words.longest,
        "places": words.places,
        "seconds": time.perf_counter() - begun,
    }


def word_parameters(recipe: "Recipe") -> int:
    """Return how many parameters a fine-tuned head has for words."""
    head = recipe.model.head
    return 0 if head.words is None else head.words.size * (head.outputs + 1)


def train_config(steps: int, seed: int, dtype: Any) -> "TrainConfig":
    """Return what evaluates at the start and twenty times, and keeps the best."""
    from jaxblt.training.train_config import TrainConfig

    often = max(steps // 20, 1)
    return TrainConfig(
        steps=steps,
        seed=seed,
        dtype=dtype,
        log_every=often,
        eval_every=often,
        eval_start=True,
        checkpoint_every=steps,
        keep_best=1,
    )


def train(recipe: "Recipe", run_dir: Path, figures: Collection[str]) -> dict[str, Any]:
    """Train, and return figures on the test split at the best validation figure, with seconds and parameters."""
    import jaxblt
    from jaxblt.training.flops import count_params
    from jaxblt.training.loop import fit

    begun = time.perf_counter()
    fit(recipe, run_dir)
    seconds = time.perf_counter() - begun
    run = jaxblt.load(run_dir, step="best")
    found = run.evaluate("test")
    parameters, without_hash = count_params(run.params)
    chosen = run.evaluate("validation")
    return {name: found[name] for name in figures} | {
        "validation": {name: chosen[name] for name in (*figures, "loss")},
        "parameters": parameters,
        "parameters_without_hash_tables": without_hash,
        "seconds": seconds,
        "best_step": run.step,
    }


def count_wins(runs: Iterable[dict[str, Any]], ours: str, models: Collection[str], figure: str) -> int:
    """Count the seeds of which all `models` were scored and `ours` has the largest figure of these."""
    by_seed: dict[int, dict[str, float]] = {}
    for run in runs:
        by_seed.setdefault(run["seed"], {})[run["model"]] = run[figure]
    scored = [found for found in by_seed.values() if found.keys() >= set(models)]
    return sum(all(found[ours] > found[name] for name in models if name != ours) for found in scored)
