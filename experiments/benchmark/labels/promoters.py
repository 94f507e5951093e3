"""Promoters told from other DNA: python -m experiments.benchmark promoters FOLDER --base-run runs/ecoli --out FILE."""

import csv
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from jaxblt.data.labelled import LabelledDataConfig
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.train_config import TrainConfig


FIGURES = ("accuracy", "mcc", "f1", "auroc", "auprc")
RATES = {"finetuned": 3e-4, "probe": 1e-2, "cnn": 1e-3}
"""Peak learning rates."""
MODELS = ("markov", "nearest", "kmers", "start", "finetuned", "probe", "cnn")
Network = Literal["finetuned", "probe", "cnn"]
SHARE = 0.001
"""One common 21-mer links two sequences: they are stretches of one genome, and many overlap."""
LONGEST = (3, 4, 5, 6)
"""Letters of the regression's longest words, of which validation picks one."""


def promoters(
    folder: Annotated[str, tyro.conf.Positional],
    out: str,
    base_run: str | None = None,
    work: str = "runs/benchmark/promoters",
    positive: tuple[str, ...] = ("Ecoli_prom",),
    negative: tuple[str, ...] = ("Ecoli_non_prom",),
    seeds: int = 3,
    first_seed: int = 0,
    steps: int = 600,
    batch_size: int = 64,
    pool: Literal["cls", "mean", "max", "attention"] = "mean",
    layer_decay: float = 1.0,
    networks: tuple[Network, ...] = ("finetuned", "probe", "cnn"),
) -> dict[str, Any]:
    """Fine-tune a run on promoters, beside a CNN of equal size, a probe of the frozen run and models of words.

    The sequences are those of Umarov and Solovyev (2016, PLoS ONE 12:e0171410), `NAME.fa` or `NAME.fa.xz` in a folder.
    A seed picks the split, parameters and order. Sequences that have a 21-mer in common, on either strand, lie in one
    part of it, and so do those that such sequences link (80/10/10). All networks train for the same steps and are
    scored at their best validation accuracy. A base run may have read the sequences without their labels.

    Args:
      folder: of the FASTA files.
      out: file for the figures as JSON, written anew after each model.
      base_run: folder of the run to start from; without one only the baselines are scored, which need no GPU.
      work: folder for tables and runs; it must be new.
      positive, negative: names of the files of promoters and of other sequences.
      seeds: how many, from `first_seed` on; runs of other seeds in `out` are kept.
      first_seed: see there.
      steps: of each network.
      batch_size: rows of a batch.
      pool: of the fine-tuned run and the probe.
      layer_decay: of the fine-tuned run's learning rate.
      networks: that are trained.
    """
    from experiments.benchmark.figures.saved import save

    chosen = seeds_of(first_seed, seeds)
    root = new_folder(work)
    table = write_table(Path(folder), root / "records.csv", positive, negative)
    settings = {
        "steps": steps,
        "batch_size": batch_size,
        "pool": pool,
        "layer_decay": layer_decay,
    }
    figures: dict[str, Any] = {
        "settings": {"split": "groups", "group_share": SHARE} | (settings if base_run else {}),
        "base_run": Path(base_run).name if base_run else None,
        "records": table,
    }
    figures["runs"] = earlier_runs(out, figures, chosen)
    name = "promoters" if base_run else "promoter_baselines"
    for seed in chosen:
        data = data_of(root / "records.csv", seed, batch_size)
        figures["runs"] += score_baselines(data)
        save(name, out, figures)
        options = {"seed": seed, "steps": steps, "pool": pool, "layer_decay": layer_decay}
        for model, recipe in recipes(base_run, data, networks, **options).items() if base_run else ():
            found = train(recipe, root / f"{model}_{seed}")
            figures["runs"].append({"model": model, "seed": seed, **found})
            figures["wins"] = count_wins(figures["runs"], "finetuned", MODELS, "mcc")
            save(name, out, figures)
    return figures


def write_table(
    folder: Path, out: Path, positive: tuple[str, ...], negative: tuple[str, ...]
) -> dict[str, int]:
    """Write sequences and labels as CSV, each once, without those of both sides. Returns how many there are."""
    from jaxblt.data.sources import parse_fasta
    from jaxblt.data.sources.files import expand
    from jaxblt.data.sources.opening import read_all

    sides = {}
    for label, names in (("promoter", positive), ("other", negative)):
        files = [file for name in names for file in expand(folder / f"{name}.fa*")]
        records = [record for file in files for record in parse_fasta(read_all(file), str(file))]
        sides[label] = dict.fromkeys(bases.decode().upper() for _, bases in records)
    both = sides["promoter"].keys() & sides["other"].keys()
    rows = [(bases, label) for label, side in sides.items() for bases in side if bases not in both]
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("sequence", "label"), *rows])
    return {label: sum(row[1] == label for row in rows) for label in sides}


def recipes(
    base_run: str,
    data: "LabelledDataConfig",
    networks: tuple[Network, ...],
    *,
    seed: int,
    steps: int,
    pool: Any,
    layer_decay: float,
) -> dict[str, "Recipe"]:
    """Return recipes of the fine-tuned run, of a probe of its states, and of a CNN."""
    import jaxblt
    from experiments.benchmark.labels.cnn import equal_size
    from jaxblt.training.finetune import finetune_recipe
    from jaxblt.training.flops import count_params
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.recipe import Recipe

    base = jaxblt.load(base_run)
    train = train_config(steps, seed, base.recipe.train.dtype)
    optimizers = {
        name: AdamWConfig(learning_rate=rate, warmup_steps=steps // 10) for name, rate in RATES.items()
    }
    tuned = finetune_recipe(
        base_run,
        data,
        name="finetuned",
        pool=pool,
        train=train,
        optimizer=replace(optimizers["finetuned"], layer_decay=layer_decay),
    )
    frozen = tuple(f"{name}/*" for name in sorted(base.params))
    probe = replace(tuned, name="probe", freeze=frozen, optimizer=optimizers["probe"])
    model = equal_size(count_params(base.params)[1] + word_parameters(tuned), len(data.classes))
    model = replace(model, causal=base.recipe.model.causal)
    cnn = Recipe(
        name="cnn",
        model=model,
        data=data,
        objective=tuned.objective,
        optimizer=optimizers["cnn"],
        train=train,
    )
    found = {"finetuned": tuned, "probe": probe, "cnn": cnn}
    return {name: recipe for name, recipe in found.items() if name in networks}


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


def data_of(table: Path, seed: int, batch_size: int) -> "LabelledDataConfig":
    """Return the table's records, in rows that hold the longest; `seed` picks how groups are dealt 80/10/10."""
    from jaxblt.data.labelled import LabelledDataConfig, fitting_length, with_classes

    groups = {"split": "groups", "group_share": SHARE, "split_seed": seed}
    data = LabelledDataConfig(paths=(str(table),), batch_size=batch_size, seed=seed, **groups)
    return with_classes(replace(data, seq_len=fitting_length(data)))


def score_baselines(data: "LabelledDataConfig") -> list[dict[str, Any]]:
    """Return what needs no neural network on the same split, a dict each, with the seconds of all of them."""
    from jaxblt.evaluation.label_baselines import label_baselines, read_split

    begun = time.perf_counter()
    found = label_baselines(read_split(data), longest=LONGEST)
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


def train(recipe: "Recipe", run_dir: Path) -> dict[str, Any]:
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
    return {name: found[name] for name in FIGURES} | {
        "validation": {name: chosen[name] for name in (*FIGURES, "loss")},
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
