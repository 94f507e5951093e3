"""Kind and unkind reviews: python -m experiments.benchmark reviews TRAIN TEST --base-run english --out FILE."""

import csv
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from experiments.benchmark.labels.labelled_runs import (
    count_wins,
    earlier_runs,
    new_folder,
    score_start,
    seeds_of,
    train,
)

if TYPE_CHECKING:
    from jaxblt.data.labelled import LabelledDataConfig
    from jaxblt.training.recipe import Recipe

FIGURES = ("accuracy", "mcc", "auroc")
VALIDATION = 0.1
"""The share of the training reviews that picks strengths and steps."""
BUCKETS = (512, 1024, 2048)
Model = Literal["start", "finetuned", "cnn"]
MODELS: tuple[Model, ...] = get_args(Model)


def reviews(
    train_file: Annotated[str, tyro.conf.Positional],
    test_file: Annotated[str, tyro.conf.Positional],
    out: str,
    base_run: str | None = None,
    work: str = "runs/benchmark/reviews",
    longest: int = 4095,
    most: int = 0,
    seeds: int = 3,
    first_seed: int = 0,
    steps: int = 1500,
    batch_size: int = 64,
    models: tuple[Model, ...] = MODELS,
) -> dict[str, Any]:
    """Fine-tune a run on reviews of films, beside a CNN of equal size and the regression on phrases it starts as.

    The reviews are those of Maas et al. (2011, "Learning word vectors for sentiment analysis"), cut at `longest` bytes
    as in the Long Range Arena (2011.04006, section 2.2). A seed picks validation reviews, parameters and order.
    Networks are scored at their best validation accuracy.

    Args:
      train_file: a table without a header of label, id, rating and text between tabs; may end in `.xz`.
      test_file: likewise.
      out: file for the figures as JSON, written anew after each model.
      base_run: run to start from; without one only the regression is scored, which needs no GPU.
      work: folder for tables and runs; it must be new.
      longest: bytes of a review.
      most: reviews of each file, drawn by seed 0; 0 for all.
      seeds: how many, from `first_seed` on; runs of other seeds in `out` are kept.
      first_seed: see there.
      steps: of each network.
      batch_size: rows of a batch of the shortest reviews; longer rows come in smaller batches.
      models: that are scored; of the regression alone, the networks' start, it takes minutes on a CPU.

    Raises:
      ValueError: nothing is left to score.
    """
    from experiments.benchmark.figures.saved import save
    from jaxblt.data.sources.files import expand_one

    if not models or (not base_run and "start" not in models):
        raise ValueError(f"models = {models} leaves nothing to score: name start, or networks and --base-run")
    files = {"train": expand_one(train_file), "test": expand_one(test_file)}
    chosen, root = seeds_of(first_seed, seeds), new_folder(work)
    settings = {"longest": longest, "most": most, "validation": VALIDATION}
    if base_run:
        settings |= {"base_run": base_run, "steps": steps, "batch_size": batch_size}
    figures: dict[str, Any] = {"settings": settings}
    figures["runs"] = earlier_runs(out, figures, chosen)
    for seed in chosen:
        table = write_table(files, root / f"records_{seed}.csv", seed, longest, most)
        data = data_of(table, seed, longest, batch_size)
        if "start" in models:
            figures["runs"].append(score_start(data))
            save("reviews" if base_run else "review_baselines", out, figures)
        for name, recipe in networks(base_run, data, steps, seed).items() if base_run else ():
            if name not in models:
                continue
            found = train(recipe, root / f"{name}_{seed}", FIGURES)
            figures["runs"].append({"model": name, "seed": seed, **found})
            figures["wins"] = count_wins(figures["runs"], "finetuned", MODELS, "accuracy")
            save("reviews", out, figures)
    return figures


def write_table(files: dict[str, Path], out: Path, seed: int, longest: int, most: int) -> Path:
    """Write text, label and part of each review as CSV."""
    from jaxblt.data.sources.opening import read_all

    with out.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(("sequence", "label", "split"))
        for part, file in files.items():
            rows = [line.split("\t") for line in read_all(file).decode().strip("\n").split("\n")]
            random.Random(0).shuffle(rows)
            rows = rows[:most] if most else rows
            random.Random(seed).shuffle(rows)
            held = int(VALIDATION * len(rows)) if part == "train" else 0
            for i, (label, _, _, text) in enumerate(rows):
                cut = text.encode()[:longest].decode(errors="ignore")
                writer.writerow((cut, label, "validation" if i < held else part))
    return out


def data_of(table: Path, seed: int, longest: int, batch_size: int) -> "LabelledDataConfig":
    """Return the table's reviews, in rows of four lengths and in batches of as many bytes each."""
    from jaxblt.data.labelled import LabelledDataConfig, with_classes

    return with_classes(
        LabelledDataConfig(
            paths=(str(table),),
            split="column",
            seq_len=longest + 1,
            buckets=tuple(size for size in BUCKETS if size < longest + 1),
            batch_size=batch_size,
            max_tokens=max(batch_size * BUCKETS[0], longest + 1),
            seed=seed,
        )
    )


def networks(base_run: str, data: "LabelledDataConfig", steps: int, seed: int) -> dict[str, "Recipe"]:
    """Return recipes of the model that starts from the run, and of a CNN of its size."""
    from dataclasses import replace

    import jaxblt
    from experiments.benchmark.labels.cnn import equal_size
    from experiments.benchmark.labels.labelled_runs import train_config, word_parameters
    from jaxblt.training.finetune import finetune_recipe
    from jaxblt.training.flops import count_params
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.recipe import Recipe

    base = jaxblt.load(base_run)
    rate = AdamWConfig(learning_rate=3e-4, warmup_steps=steps // 10)
    config = train_config(steps, seed, base.recipe.train.dtype)
    tuned = finetune_recipe(base_run, data, dropout=0.1, train=config, optimizer=rate)
    model = equal_size(count_params(base.params)[1] + word_parameters(tuned), len(data.classes))
    cnn = Recipe(
        name="cnn",
        model=replace(model, causal=tuned.model.causal),
        data=data,
        objective=tuned.objective,
        optimizer=replace(rate, learning_rate=1e-3),
        train=config,
    )
    return {"finetuned": tuned, "cnn": cnn}
