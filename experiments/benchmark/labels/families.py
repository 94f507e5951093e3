"""Protein families: python -m experiments.benchmark families astral.fa.xz --out runs/benchmark/families.json."""

from collections import Counter
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

Arm = Literal["simple", "finetuned", "bytes", "cnn"]
FIGURES = ("accuracy", "mcc", "f1")
RATES = {"base": 1e-3, "finetuned": 5e-4, "bytes": 1e-3, "cnn": 1e-3}
"""Peak learning rates of the masked base, of the model that starts from it, and of those that start from nothing."""
MODELS = ("markov", "nearest", "kmers", "start", "finetuned", "bytes", "cnn")
SHARE = 0.5
"""Domains that share half of their 5-mers lie in one part; at 40 % identity hardly any do."""
LEVELS = {"fold": 2, "superfamily": 3, "family": 4}
"""Parts of SCOPe's class.fold.superfamily.family that name a class."""
BUCKETS = (256,)


def families(
    file: Annotated[str, tyro.conf.Positional],
    out: str,
    base_run: str | None = None,
    arms: tuple[Arm, ...] = ("simple", "finetuned", "bytes", "cnn"),
    work: str = "runs/benchmark/families",
    level: Literal["fold", "superfamily", "family"] = "superfamily",
    members: int = 30,
    longest: int = 511,
    seeds: int = 3,
    first_seed: int = 0,
    base_steps: int = 3000,
    steps: int = 1500,
    batch_size: int = 64,
    dim: int = 384,
    layers: int = 4,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    kmer: int = 3,
    dropout: float = 0.3,
) -> dict[str, Any]:
    """Fine-tune a byte model to name a domain's superfamily, beside a CNN of equal size and models of short words.

    The sequences are SCOPe domains (Fox, Brenner and Chandonia 2014, Nucleic Acids Res. 42:D304) whose FASTA headers
    say class.fold.superfamily.family behind the name. A seed picks the split (80/10/10, by groups of near-copies),
    parameters and order. A base learns hidden residues of all domains of the file outside of validation and test; the
    same model is also trained without it. Networks are scored at their best validation accuracy. With a run to start
    from, no base is trained.

    Args:
      file: FASTA, may end in `.gz` or `.xz`.
      out: file for the figures as JSON, written anew after each model.
      base_run: run to start from, such as `proteins`, instead of the base.
      arms: simple models, and networks.
      work: folder for tables and runs; it must be new.
      level: what a class is.
      members: the fewest domains of a class.
      longest: residues of the longest domain that is kept.
      seeds: how many, from `first_seed` on; runs of other seeds in `out` are kept.
      first_seed: see there.
      base_steps: of the base.
      steps: of each classifier.
      batch_size: rows of a batch.
      dim, layers: of the byte model.
      dtype: of the networks' computation.
      kmer: letters of the longest words.
      dropout: of the fine-tuned head.
    """
    from experiments.benchmark.figures.saved import save

    chosen, root = seeds_of(first_seed, seeds), new_folder(work)
    table = write_table(Path(file), root / "records.csv", level, members, longest)
    settings = {"level": level, "members": members, "longest": longest}
    settings |= {"base_steps": base_steps, "steps": steps}
    settings |= {"batch_size": batch_size, "dim": dim, "layers": layers, "dtype": dtype, "kmer": kmer}
    settings |= {"dropout": dropout, "split": "groups", "group_share": SHARE} | (
        {"base_run": base_run} if base_run else {}
    )
    figures: dict[str, Any] = {"settings": settings, "records": table}
    figures["runs"] = earlier_runs(out, figures, chosen)

    def networks_of(data: "LabelledDataConfig", seed: int) -> dict[str, "Recipe"]:
        if set(arms) == {"simple"}:
            return {}
        model = byte_model(dim, layers)
        base = base_run or pretrain(data, Path(file), root / f"base_{seed}", model, base_steps, dtype)
        made = networks(base, data, steps=steps, dropout=dropout)
        return {name: recipe for name, recipe in made.items() if name in arms}

    for seed in chosen:
        data = data_of(root / "records.csv", seed, batch_size, group_share=SHARE, buckets=BUCKETS)
        if "simple" in arms:
            figures["runs"] += score_baselines(data, (kmer,))
            save("families", out, figures)
        for name, recipe in networks_of(data, seed).items():
            found = train(recipe, root / f"{name}_{seed}", FIGURES)
            figures["runs"].append({"model": name, "seed": seed, **found})
            figures["wins"] = count_wins(figures["runs"], "finetuned", MODELS, "accuracy")
            save("families", out, figures)
    return figures


def write_table(file: Path, out: Path, level: str, members: int, longest: int) -> dict[str, int]:
    """Write domains and classes as CSV, each sequence once. Returns how many there are, and of how many classes.

    Raises:
      ValueError: a header names no class, or fewer than two classes are large enough.
    """
    found = {
        sequence: label for label, sequence in _read_domains(file, LEVELS[level]) if len(sequence) <= longest
    }
    counts = Counter(found.values())
    rows = [(sequence, label) for sequence, label in found.items() if counts[label] >= members]
    classes = {label for _, label in rows}
    if len(classes) < 2:
        raise ValueError(f"{file} has {len(classes)} classes of at least {members} domains: lower --members")
    write_records(out, rows)
    return {"domains": len(rows), "classes": len(classes), "largest_class": max(counts.values())}


def _read_domains(file: Path, parts: int) -> list[tuple[str, str]]:
    """Return class and sequence of each domain; `parts` parts of the header's second word are the class."""
    from jaxblt.data.sources.opening import read_all

    found = []
    for record in f"\n{read_all(file).decode('ascii')}".split("\n>")[1:]:
        header, *lines = record.splitlines()
        said = header.split()[1:2]
        if not said or said[0].count(".") != 3:
            raise ValueError(
                f"{file}: header {header!r:.60} names no class such as a.1.1.1 behind the name: take SCOPe's FASTA"
            )
        found.append((".".join(said[0].split(".")[:parts]), "".join(lines).upper()))
    return found


def pretrain(
    data: "LabelledDataConfig", file: Path, run_dir: Path, model: Any, steps: int, dtype: Any
) -> Path:
    """Return the folder of a run that learned hidden residues of domains outside of validation and test."""
    from jaxblt.data import DataConfig
    from jaxblt.evaluation.label_baselines import read_split
    from jaxblt.training.loop import fit
    from jaxblt.training.objectives.objectives import Masked
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.recipe import Recipe

    parts = read_split(data)
    held = {sequence.decode() for part in ("validation", "test") for sequence in parts[part][0]}
    shown = {sequence for _, sequence in _read_domains(file, 1)} - held
    text = run_dir.with_suffix(".fa")
    text.write_text("".join(f">d{i}\n{sequence}\n" for i, sequence in enumerate(sorted(shown))))
    # Use one set: what is held out is held out by the classes' split
    packed = DataConfig(
        paths=(str(text),),
        kind="fasta",
        packing="first_fit",
        split="documents",
        fractions=(1.0, 0.0, 0.0),
        seq_len=512,
        batch_size=data.batch_size,
        seed=data.seed,
    )
    recipe = Recipe(
        name="base",
        model=model,
        data=packed,
        objective=Masked(),
        optimizer=AdamWConfig(learning_rate=RATES["base"], warmup_steps=steps // 10),
        train=replace(train_config(steps, data.seed, dtype), eval_every=0, eval_start=False, keep_best=0),
    )
    fit(recipe, run_dir)
    return run_dir


def tuned(base: str | Path, data: "LabelledDataConfig", *, steps: int, dropout: float) -> "Recipe":
    """Return the recipe of the model that starts from a run."""
    from jaxblt.training.finetune import finetune_recipe
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.stored.resolved import read_resolved

    optimizer = AdamWConfig(learning_rate=RATES["finetuned"], warmup_steps=steps // 10)
    train = train_config(steps, data.seed, read_resolved(base).recipe.train.dtype)
    return finetune_recipe(base, data, name="finetuned", dropout=dropout, train=train, optimizer=optimizer)


def networks(
    base: str | Path, data: "LabelledDataConfig", *, steps: int, dropout: float
) -> dict[str, "Recipe"]:
    """Return recipes of the model that starts from the base, of the same from nothing, and of a CNN of its size."""
    import jaxblt
    from experiments.benchmark.labels.cnn import equal_size
    from jaxblt.training.flops import count_params

    found, run = tuned(base, data, steps=steps, dropout=dropout), jaxblt.load(base)
    optimizer = replace(found.optimizer, learning_rate=RATES["bytes"])
    alone = replace(found, name="bytes", init_from=None, fresh=(), optimizer=optimizer)
    size = equal_size(count_params(run.params)[1] + word_parameters(found), len(data.classes))
    cnn = replace(size, causal=found.model.causal)
    # A CNN has no regression on words, whose rate is none.
    plain = replace(
        alone, name="cnn", model=cnn, optimizer=replace(optimizer, learning_rate=RATES["cnn"], rates=())
    )
    return {"finetuned": found, "bytes": alone, "cnn": plain}


def byte_model(dim: int, layers: int) -> Any:
    """Return Hyena and attention in both directions over bytes and hashed n-grams of 2 and 3."""
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import ByteLMConfig, HashConfig, StackConfig

    mixers = {"attention": AttentionConfig(dim=dim, num_heads=max(dim // 64, 1))}
    stack = StackConfig(
        dim=dim,
        num_layers=layers,
        pattern=("hyena_short", "hyena_short", "hyena_short", "attention"),
        mixers=mixers,
        dropout=0.2,
        causal=False,
    )
    return ByteLMConfig(stack=stack, hash=HashConfig(sizes=(2, 3), table_size=16_384))
