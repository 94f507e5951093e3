"""Promoters told from other DNA: python -m experiments.benchmark promoters FOLDER --base-run runs/ecoli --out FILE."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from experiments.benchmark._labelled import (
    count_wins,
    data_of,
    earlier_runs,
    new_folder,
    read_classes,
    seeds_of,
    train,
    train_config,
    write_records,
)

if TYPE_CHECKING:
    from jaxblt.data.labelled import LabelledDataConfig
    from jaxblt.training.recipe import Recipe

FIGURES = ("accuracy", "mcc", "f1", "auroc", "auprc")
RATES = {"finetuned": 3e-4, "probe": 1e-2, "cnn": 1e-3}
"""Peak learning rates."""
MODELS = ("kmers", *RATES)


def promoters(
    folder: Annotated[str, tyro.conf.Positional],
    base_run: str,
    out: str,
    work: str = "runs/benchmark/promoters",
    positive: tuple[str, ...] = ("Ecoli_prom",),
    negative: tuple[str, ...] = ("Ecoli_non_prom",),
    seeds: int = 3,
    first_seed: int = 0,
    steps: int = 600,
    batch_size: int = 64,
    kmer: int = 5,
    pool: Literal["cls", "mean", "max", "attention"] = "mean",
    layer_decay: float = 1.0,
) -> dict[str, Any]:
    """Fine-tunes a run on promoters, against k-mer regression, a CNN of equal size and a probe of the frozen run.

    The sequences are those of Umarov and Solovyev (2016, PLoS ONE 12:e0171410), `NAME.fa` or `NAME.fa.xz` in a folder.
    A seed picks the split (80/10/10, by a hash of the sequence), parameters and order. All networks train for the same
    steps and are scored at their best validation accuracy. A base run may have read the sequences without their labels.

    Args:
      folder: of the FASTA files.
      base_run: folder of the run to start from.
      out: file for the figures as JSON, written anew after each model.
      work: folder for tables and runs; it must be new.
      positive, negative: names of the files of promoters and of other sequences.
      seeds: how many, from `first_seed` on; runs of other seeds in `out` are kept.
      first_seed: see there.
      steps: of each network.
      batch_size: rows of a batch.
      kmer: letters of the regression's longest words.
      pool: of the fine-tuned run and the probe.
      layer_decay: of the fine-tuned run's learning rate.
    """
    from experiments.benchmark._schema import save

    chosen = seeds_of(first_seed, seeds)
    root = new_folder(work)
    table = write_table(Path(folder), root / "records.csv", positive, negative)
    settings = {
        "steps": steps,
        "batch_size": batch_size,
        "pool": pool,
        "kmer": kmer,
        "layer_decay": layer_decay,
    }
    figures: dict[str, Any] = {
        "settings": settings,
        "base_run": Path(base_run).name,
        "records": table,
    }
    figures["runs"] = earlier_runs(out, figures, chosen)
    for seed in chosen:
        data = data_of(root / "records.csv", seed, batch_size)
        recipes = networks(base_run, data, seed=seed, steps=steps, pool=pool, layer_decay=layer_decay)
        figures["runs"].append({"model": "kmers", "seed": seed, **_score_kmers(data, kmer)})
        for name, recipe in recipes.items():
            found = train(recipe, root / f"{name}_{seed}", FIGURES)
            figures["runs"].append({"model": name, "seed": seed, **found})
            figures["wins"] = count_wins(figures["runs"], "finetuned", MODELS, "mcc")
            save("promoters", out, figures)
    return figures


def write_table(
    folder: Path, out: Path, positive: tuple[str, ...], negative: tuple[str, ...]
) -> dict[str, int]:
    """Sequences and labels as CSV, each sequence once; one that stands on both sides is left out. Returns how many."""
    from jaxblt.data.sources import parse_fasta
    from jaxblt.data.sources.files import expand, read_all

    sides = {}
    for label, names in (("promoter", positive), ("other", negative)):
        files = [file for name in names for file in expand(folder / f"{name}.fa*")]
        records = [record for file in files for record in parse_fasta(read_all(file), str(file))]
        sides[label] = dict.fromkeys(bases.decode().upper() for _, bases in records)
    both = sides["promoter"].keys() & sides["other"].keys()
    rows = [(bases, label) for label, side in sides.items() for bases in side if bases not in both]
    write_records(out, rows)
    return {label: sum(row[1] == label for row in rows) for label in sides}


def networks(
    base_run: str, data: "LabelledDataConfig", *, seed: int, steps: int, pool: Any, layer_decay: float
) -> dict[str, "Recipe"]:
    """Recipes of the fine-tuned run, of the probe that trains a head alone, and of the CNN."""
    import jaxblt
    from experiments.benchmark._cnn import equal_size
    from jaxblt.training.finetune import finetune_recipe
    from jaxblt.training.flops import count_params
    from jaxblt.training.optimizer import AdamWConfig
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
    model = equal_size(count_params(base.params)[1], len(data.classes))
    model = replace(model, causal=base.recipe.model.causal)
    cnn = Recipe(
        name="cnn",
        model=model,
        data=data,
        objective=tuned.objective,
        optimizer=optimizers["cnn"],
        train=train,
    )
    return {"finetuned": tuned, "probe": probe, "cnn": cnn}


def _score_kmers(data: "LabelledDataConfig", longest: int) -> dict[str, Any]:
    from experiments.benchmark._kmers import score_kmers

    begun = time.perf_counter()
    return score_kmers(read_classes(data), longest) | {"seconds": time.perf_counter() - begun}
