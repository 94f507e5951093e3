"""Promoters told from other DNA: python -m experiments.benchmark promoters FOLDER --base-run runs/ecoli --out FILE."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from experiments.benchmark.labels.labelled_runs import (
    count_wins,
    data_of,
    earlier_runs,
    new_folder,
    score_baselines,
    seeds_of,
    train,
    train_config,
    word_parameters,
    write_records,
)

if TYPE_CHECKING:
    from jaxblt.data.labelled import LabelledDataConfig
    from jaxblt.training.recipe import Recipe

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
        data = data_of(root / "records.csv", seed, batch_size, group_share=SHARE)
        figures["runs"] += score_baselines(data, LONGEST)
        save(name, out, figures)
        options = {"seed": seed, "steps": steps, "pool": pool, "layer_decay": layer_decay}
        for model, recipe in recipes(base_run, data, networks, **options).items() if base_run else ():
            found = train(recipe, root / f"{model}_{seed}", FIGURES)
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
    write_records(out, rows)
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
