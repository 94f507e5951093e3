"""Effects of mutations as numbers: python -m experiments.benchmark fitness avgfp.tsv.xz --out FILE [--base-run RUN]."""

import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from experiments.benchmark.labels.labelled_runs import (
    earlier_runs,
    new_folder,
    seeds_of,
    train,
    train_config,
    word_parameters,
)

if TYPE_CHECKING:
    from jaxblt.data.labelled import LabelledDataConfig
    from jaxblt.training.recipe import Recipe

FIGURES = ("rmse", "pearson", "spearman")
RATES = {"finetuned": 3e-4, "cnn": 1e-3}
"""Peak learning rates."""
PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Of the ridge on one-hot letters, of which validation picks one."""
SHARES = (0.8, 0.1, 0.1)
PARTS = ("train", "validation", "test")


def fitness(
    file: Annotated[str, tyro.conf.Positional],
    out: str,
    base_run: str | None = None,
    work: str = "runs/benchmark/fitness",
    split: Literal["random", "positions"] = "random",
    most: int = 10_000,
    seeds: int = 3,
    first_seed: int = 0,
    steps: int = 400,
    batch_size: int = 64,
) -> dict[str, Any]:
    """Fine-tune a run on a deep mutational scan, beside one-hot ridge, regressions on words and a CNN.

    A seed picks the variants, the split, parameters and order. With "positions" no position that a test variant
    changes is changed in training or validation; variants of both sides are left out. Networks are scored at their best
    validation error.

    Args:
      file: table of variants such as "A108D,N144D" and a column "score" (Gelman et al. 2021, nn4dms).
      out: file for the figures as JSON, written anew after each model.
      base_run: folder of the run to start from; without one only what needs no GPU is scored.
      work: folder for tables and runs; it must be new.
      split: see above.
      most: variants that are drawn.
      seeds: how many, from `first_seed` on; runs of other seeds in `out` are kept.
      first_seed: see there.
      steps: of each network.
      batch_size: rows of a batch.
    """
    from experiments.benchmark.figures.saved import save

    chosen, root = seeds_of(first_seed, seeds), new_folder(work)
    variants = read_variants(Path(file))
    settings = {"split": split, "most": most} | (
        {"steps": steps, "batch_size": batch_size} if base_run else {}
    )
    figures: dict[str, Any] = {"set": Path(file).name.partition(".")[0], "settings": settings}
    figures |= {"base_run": Path(base_run).name if base_run else None, "variants": len(variants)}
    figures["runs"] = earlier_runs(out, figures, chosen)
    for seed in chosen:
        data = write_split(variants, root / f"records_{seed}.csv", split, most, seed, batch_size)
        figures["runs"] += score_regressions(data)
        save("fitness", out, figures)
        for name, recipe in networks(base_run, data, steps=steps).items() if base_run else ():
            found = train(recipe, root / f"{name}_{seed}", FIGURES)
            figures["runs"].append({"model": name, "seed": seed, **found})
            save("fitness", out, figures)
    return figures


def read_variants(file: Path) -> list[tuple[str, float, tuple[int, ...]]]:
    """Return sequence, score and changed positions of each variant whose letters are amino acids.

    The wild type's letters are those that variants say; a position that none changes is X.

    Raises:
      ValueError: the table has no column "variant" or "score", or two variants disagree on the wild type.
    """
    from jaxblt.data.sources.opening import read_lines
    from jaxblt.models.word_features import LETTERS

    rows = list(csv.DictReader(read_lines(file), delimiter="\t"))
    if not rows or not {"variant", "score"} <= rows[0].keys():
        raise ValueError(f"{file} has no columns 'variant' and 'score' of tab-separated values")
    changes = [[(m[0], int(m[1:-1]), m[-1]) for m in row["variant"].split(",")] for row in rows]
    wild: dict[int, str] = {}
    for letter, place, _ in (change for found in changes for change in found):
        if wild.setdefault(place, letter) != letter:
            raise ValueError(f"{file}: variants say {wild[place]} and {letter} of position {place}")
    first, last = min(wild), max(wild)
    letters = [wild.get(place, "X") for place in range(first, last + 1)]
    variants = []
    for row, found in zip(rows, changes, strict=True):
        if row["score"] in ("", "nan") or any(new not in LETTERS["protein"] for *_, new in found):
            continue
        own = letters.copy()
        for _, place, new in found:
            own[place - first] = new
        variants.append(("".join(own), float(row["score"]), tuple(place - first for _, place, _ in found)))
    return variants


def deal(places: list[tuple[int, ...]], split: str, rng: np.random.Generator) -> Iterator[str | None]:
    """Yield the part of each variant, None for one that is of both sides."""
    if split == "random":
        yield from rng.choice(PARTS, len(places), p=SHARES).tolist()
        return
    size = 1 + max(max(found) for found in places)
    part = rng.choice(PARTS, size, p=SHARES)
    for found in places:
        of = {str(part[place]) for place in found}
        yield of.pop() if len(of) == 1 else None


def write_split(
    variants: list[Any], out: Path, split: str, most: int, seed: int, batch_size: int
) -> "LabelledDataConfig":
    """Write `most` variants as CSV with their parts, and return them as labelled data."""
    from jaxblt.data.labelled import LabelledDataConfig, fitting_length

    rng = np.random.default_rng(seed)
    drawn = [variants[i] for i in sorted(rng.permutation(len(variants))[:most])]
    parts = deal([places for *_, places in drawn], split, rng)
    rows = [(s, y, part) for (s, y, _), part in zip(drawn, parts, strict=True) if part is not None]
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("sequence", "label", "split"), *rows])
    data = LabelledDataConfig(
        paths=(str(out),), target="number", split="column", batch_size=batch_size, seed=seed
    )
    return replace(data, seq_len=fitting_length(data))


def score_regressions(data: "LabelledDataConfig") -> list[dict[str, Any]]:
    """Return the test figures of ridge on one-hot letters, of words alone ("words"), and of a head's "start"."""
    from jaxblt.data.labelled import number_statistics
    from jaxblt.training.finetune import words_of
    from jaxblt.training.start.word_regression import (
        Examples,
        choose,
        choose_features,
        find_rarity,
        read_words,
        weigh,
    )

    begun, words = time.perf_counter(), words_of(data)
    assert words is not None
    center, scale = number_statistics(data)
    counts = read_words(data, words, PARTS, center=center, scale=scale)
    rarity = find_rarity(counts["train"].x)
    parts = {name: weigh(part, rarity, words) for name, part in counts.items()}
    alone = {name: Examples(part.x[:, : words.words], part.y) for name, part in parts.items()}
    placed = {name: Examples(part.x[:, words.words :].sign(), part.y) for name, part in parts.items()}
    fits = {
        "words": (alone, choose(alone["train"], alone["validation"], 1)),
        "start": (parts, choose_features(parts["train"], parts["validation"], words, 1)),
        "ridge": (placed, fit_ridge(placed)),
    }
    seconds, runs = time.perf_counter() - begun, []
    for name, (of, fitted) in fits.items():
        x, y = of["test"]
        figures = number_figures((x @ fitted.kernel + fitted.bias)[:, 0] * scale, y * scale)
        runs.append({"model": name, "seed": data.seed, **figures, "records": len(y), "seconds": seconds})
    return runs


def fit_ridge(parts: Any) -> Any:
    """Return ridge regression on the letters of all places, with the penalty that validation picks."""
    from scipy.sparse.linalg import lsqr

    from jaxblt.training.start.word_regression import Regression, loss

    (x, y), found = parts["train"], []
    for penalty in PENALTIES:
        kernel = lsqr(x.astype(np.float64), y - y.mean(), damp=penalty**0.5, iter_lim=500)[0]
        found.append(Regression(kernel[:, None], np.array([y.mean()])))
    return min(found, key=lambda fitted: loss(*parts["validation"], fitted))


def number_figures(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return root mean square error, Pearson's and Spearman's coefficients."""
    from scipy.stats import pearsonr, spearmanr

    return {
        "rmse": float(((answers - labels) ** 2).mean() ** 0.5),
        "pearson": float(pearsonr(answers, labels)[0]),
        "spearman": float(spearmanr(answers, labels)[0]),
    }


def networks(base_run: str, data: "LabelledDataConfig", *, steps: int) -> dict[str, "Recipe"]:
    """Return recipes of the fine-tuned run, of one whose fitted words are trained too, and of a CNN of its size."""
    import jaxblt
    from experiments.benchmark.labels.cnn import equal_size
    from jaxblt.training.finetune import finetune_recipe
    from jaxblt.training.flops import count_params
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.recipe import Recipe

    base = jaxblt.load(base_run)
    options = {"train": train_config(steps, data.seed, base.recipe.train.dtype)}
    rates = {name: AdamWConfig(learning_rate=rate, warmup_steps=steps // 10) for name, rate in RATES.items()}
    tuned = finetune_recipe(base_run, data, name="finetuned", optimizer=rates["finetuned"], **options)
    model = equal_size(count_params(base.params)[1] + word_parameters(tuned), 1)
    model = replace(model, causal=base.recipe.model.causal)
    plain = Recipe("cnn", model, data, tuned.objective, rates["cnn"], **options)
    return {"finetuned": tuned, "cnn": plain}
