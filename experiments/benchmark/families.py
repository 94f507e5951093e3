"""Protein families: python -m experiments.benchmark families astral.fa.xz --out runs/benchmark/families.json."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from experiments.benchmark._labelled import (
    check_seeds,
    count_wins,
    data_of,
    new_folder,
    read_classes,
    train,
    train_config,
    write_records,
)

if TYPE_CHECKING:
    from jaxblt.data.labelled import LabelledDataConfig
    from jaxblt.training.recipe import Recipe

FIGURES = ("accuracy", "mcc", "f1")
RATES = {"bytes": 1e-3, "cnn": 1e-3}
"""Peak learning rates."""
MODELS = ("nearest", "regression", *RATES)
LEVELS = {"fold": 2, "superfamily": 3, "family": 4}
"""Parts of SCOPe's class.fold.superfamily.family that name a class."""
BUCKETS = (128, 256)


def families(
    file: Annotated[str, tyro.conf.Positional],
    out: str,
    work: str = "runs/benchmark/families",
    level: Literal["fold", "superfamily", "family"] = "superfamily",
    members: int = 30,
    longest: int = 511,
    seeds: int = 3,
    steps: int = 2000,
    batch_size: int = 64,
    dim: int = 256,
    layers: int = 4,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    kmer: int = 3,
) -> dict[str, Any]:
    """Trains a byte model to name a domain's superfamily, against profiles of k-mers and a CNN of equal size.

    The sequences are SCOPe domains (Fox, Brenner and Chandonia 2014, Nucleic Acids Res. 42:D304) whose FASTA headers
    say class.fold.superfamily.family behind the name. A seed picks the split (80/10/10, by a hash of the sequence),
    parameters and order. Networks are scored at their best validation accuracy.

    Args:
      file: FASTA, may end in `.gz` or `.xz`.
      out: file for the figures as JSON, written anew after each model.
      work: folder for tables and runs; it must be new.
      level: what a class is.
      members: the fewest domains of a class.
      longest: residues of the longest domain that is kept.
      seeds: 0, 1, ... of so many.
      steps: of each network.
      batch_size: rows of a batch.
      dim, layers: of the byte model.
      dtype: of the networks' computation.
      kmer: letters of the longest words.
    """
    from experiments.benchmark._schema import save

    check_seeds(seeds)
    root = new_folder(work)
    table = write_table(Path(file), root / "records.csv", level, members, longest)
    settings = {"level": level, "members": members, "longest": longest, "steps": steps, "kmer": kmer}
    settings |= {"batch_size": batch_size, "dim": dim, "layers": layers, "dtype": dtype}
    figures: dict[str, Any] = {"settings": settings, "records": table, "runs": []}
    for seed in range(seeds):
        data = data_of(root / "records.csv", seed, batch_size, BUCKETS)
        figures["runs"] += [{"model": name, "seed": seed, **found} for name, found in _score(data, kmer)]
        for name, recipe in networks(data, dim, layers, seed=seed, steps=steps, dtype=dtype).items():
            found = train(recipe, root / f"{name}_{seed}", FIGURES)
            figures["runs"].append({"model": name, "seed": seed, **found})
            figures["wins"] = count_wins(figures["runs"], "bytes", MODELS, "accuracy")
            save("families", out, figures)
    return figures


def write_table(file: Path, out: Path, level: str, members: int, longest: int) -> dict[str, int]:
    """Domains and classes as CSV, each sequence once. Returns how many there are, and of how many classes.

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
    """Class and sequence of each domain, in upper case; `parts` parts of the header's second word are the class."""
    from jaxblt.data.sources.files import read_all

    found = []
    for record in read_all(file).decode("ascii").split(">")[1:]:
        header, *lines = record.splitlines()
        said = header.split()[1:2]
        if not said or said[0].count(".") != 3:
            raise ValueError(
                f"{file}: header {header!r:.60} names no class such as a.1.1.1 behind the name: take SCOPe's FASTA"
            )
        found.append((".".join(said[0].split(".")[:parts]), "".join(lines).upper()))
    return found


def networks(
    data: "LabelledDataConfig", dim: int, layers: int, *, seed: int, steps: int, dtype: Any
) -> dict[str, "Recipe"]:
    """Recipes of the byte model and of the CNN that has as many parameters outside hash tables."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark._cnn import equal_size
    from jaxblt.training.flops import count_params
    from jaxblt.training.objectives import Classify
    from jaxblt.training.optimizer import AdamWConfig
    from jaxblt.training.recipe import Recipe

    model = byte_model(dim, layers, len(data.classes))
    shapes = jax.eval_shape(model.build().init, jax.random.key(0), jnp.zeros((1, 32), jnp.int32))["params"]
    cnn = replace(equal_size(count_params(shapes)[1], len(data.classes)), causal=False)
    return {
        name: Recipe(
            name=name,
            model=config,
            data=data,
            objective=Classify(causal=False),
            optimizer=AdamWConfig(learning_rate=RATES[name], warmup_steps=steps // 10),
            train=train_config(steps, seed, dtype),
        )
        for name, config in {"bytes": model, "cnn": cnn}.items()
    }


def byte_model(dim: int, layers: int, outputs: int) -> Any:
    """Hyena and attention in both directions over bytes and hashed n-grams of 2 and 3, and the mean of their states."""
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import ByteLMConfig, HashConfig, StackConfig
    from jaxblt.models.label_head import LabelHeadConfig
    from jaxblt.models.labeller import LabellerConfig

    mixers = {"A": AttentionConfig(dim=dim, num_heads=max(dim // 64, 1))}
    stack = StackConfig(dim=dim, num_layers=layers, pattern="SSSA", mixers=mixers, dropout=0.2, causal=False)
    base = ByteLMConfig(stack=stack, hash=HashConfig(sizes=(2, 3), table_size=16_384))
    return LabellerConfig(base, LabelHeadConfig(outputs=outputs, dropout=0.3))


def _score(data: "LabelledDataConfig", longest: int) -> list[tuple[str, dict[str, float]]]:
    from experiments.benchmark._profiles import score_profiles

    return list(score_profiles(read_classes(data), longest).items())
