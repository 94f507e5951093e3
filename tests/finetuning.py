"""A tiny base run on random letters, and labelled records that tell a motif from its absence."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from jaxblt.data import DataConfig
from jaxblt.models import ByteLMConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import start, without_frozen
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir, write_resolved
from jaxblt.training.train_config import TrainConfig
from tests.answers.runs import NEAR
from tests.parameters import drawn

MODEL = ByteLMConfig(stack=replace(NEAR, num_layers=2, pattern="SS"), tie_head=False)
MOTIF = "TATAAT"


def base_recipe():
    return Recipe(
        name="base",
        model=MODEL,
        data=DataConfig(seq_len=64, batch_size=8, soft_mask="upper"),
        train=TrainConfig(dtype="float32"),
    )


def write_base(folder: Path) -> None:
    """A run's folder as two steps would have left it; drawing the parameters compiles nothing."""
    recipe = base_recipe()
    params = drawn(recipe.model.build(), jnp.zeros((1, 16), jnp.int32))["params"]
    with Checkpointer(checkpoint_dir(folder)) as checkpoints:
        checkpoints.save(2, without_frozen(start(params, optax.identity())))
    write_resolved(folder, Resolved(recipe, {}))


def records(count=240, seed=0):
    """Sequences of 20 to 40 letters, half of them with the motif: (name, sequence, label)."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        letters = "".join("ACGT"[k] for k in rng.integers(0, 4, rng.integers(20, 40)))
        place, label = rng.integers(0, 14), ("background", "promoter")[i % 2]
        if label == "promoter":
            letters = letters[:place] + MOTIF + letters[place + len(MOTIF) :]
        else:
            letters = letters.replace("TAT", "TCT")
        found.append((f"r{i}", letters, label))
    return found


def write_records(folder: Path, **options) -> None:
    """As JSON lines; and as FASTA with a table of labels."""
    found = records(**options)
    lines = [json.dumps({"id": name, "sequence": s, "label": label}) + "\n" for name, s, label in found]
    (folder / "promoters.jsonl").write_text("".join(lines))
    (folder / "promoters.fa").write_text("".join(f">{name}\n{s.lower()}\n" for name, s, _ in found))
    (folder / "labels.tsv").write_text("".join(f"{name}\t{label}\n" for name, _, label in found))
