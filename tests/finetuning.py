"""A tiny base run on random letters, and labelled records that tell a motif from its absence."""

import json
from pathlib import Path

import numpy as np

from jaxblt.data import DataConfig
from jaxblt.models import ByteLMConfig
from jaxblt.training.loop import fit
from jaxblt.training.optimizer import AdamWConfig
from jaxblt.training.recipe import Recipe, TrainConfig
from tests.answers.runs import NEAR
from tests.training.tiny import Letters

MODEL = ByteLMConfig(
    stack=NEAR.__class__(**{**NEAR.__dict__, "num_layers": 2, "pattern": "SS"}), tie_head=False
)
MOTIF = "TATAAT"


def base_recipe(**fields):
    return Recipe(
        name="base",
        model=MODEL,
        data=DataConfig(seq_len=64, batch_size=8, soft_mask="upper"),
        optimizer=AdamWConfig(learning_rate=1e-2, warmup_steps=1),
        train=TrainConfig(steps=2, dtype="float32", eval_every=0, log_every=1),
        **fields,
    )


def train_base(folder):
    fit(base_recipe(), folder, source=Letters())
    return folder


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


def write_records(folder: Path, **options) -> Path:
    """As JSON lines; and as FASTA with a table of labels."""
    found = records(**options)
    lines = [json.dumps({"id": name, "sequence": s, "label": label}) + "\n" for name, s, label in found]
    (folder / "records.jsonl").write_text("".join(lines))
    (folder / "records.fa").write_text("".join(f">{name}\n{s.lower()}\n" for name, s, _ in found))
    (folder / "labels.tsv").write_text("".join(f"{name}\t{label}\n" for name, _, label in found))
    return folder / "records.jsonl"
