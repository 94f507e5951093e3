"""The number of pairs a mixer recalls: python -m experiments.benchmark recall --pairs 64 --mixers D A --out FILE."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.benchmark.models.state_edges import with_edges
from experiments.benchmark.tasks.training_budget import CHUNK, Budget
from jaxblt.validation import check_bounds

if TYPE_CHECKING:
    from jaxblt.data.tasks import MQAR
    from jaxblt.models import ByteLMConfig

SOLVED = 0.999
"""A model that answers so many of a chunk's questions, on rows it has not seen, is trained no further."""
TEST_ROWS = 1024
SLOTS = 128
"""The slots of each head of the state engine `T`; `T_top_k` writes to an eighth of them, `T64` has 64, `T_edges` has
edges.
"""
LEVELS = (32, 16, 8)
"""Slots of `T_levels`, of which those of upper levels forget more slowly; `T56` has as many."""


@dataclass(frozen=True, kw_only=True)
class Settings(Budget):
    """The settings that all models of a measurement share.

    Attributes:
      symbols: of the vocabulary; keys are half of them, values the others.
      dim: width.
      layers: blocks; before each mixer stands one with only a short convolution.
      heads: of the mixers with a matrix of state, which then has dim / heads rows.
      tokens: of a batch; rows have 4 positions a pair, or 64.
      window: steps that W and S see in any case.
      block, top_k: tokens in a block of S, and blocks that a token chooses.
    """

    symbols: int = 1024
    dim: int = 256
    layers: int = 4
    heads: int = 2
    tokens: int = 65_536
    window: int = 32
    block: int = 16
    top_k: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", "layers", least=2)
        check_bounds(self, "dim", "heads", "tokens", "window", "block", "top_k", least=1)

    def task(self, pairs: int) -> "MQAR":
        """Return recall of so many pairs."""
        from jaxblt.data.tasks import MQAR

        return MQAR(symbols=self.symbols, pairs=pairs, positions=max(4 * pairs, 64))

    def model(self, mixer: str, task: "MQAR") -> "ByteLMConfig":
        """Return short convolutions and mixers in turn, without MLPs."""
        from jaxblt.mixers import (
            AttentionConfig,
            GatedDeltaNetConfig,
            GatedLinearAttentionConfig,
            HyenaConfig,
            SparseAttentionConfig,
            StateEngineConfig,
        )
        from jaxblt.models import ByteLMConfig, StackConfig

        slots = StateEngineConfig(dim=self.dim, num_heads=self.heads, num_slots=SLOTS)
        attention = AttentionConfig(dim=self.dim, num_heads=2 * self.heads, packed=False)
        mixers = {
            "A": attention,
            "W": replace(attention, window=self.window),
            "S": SparseAttentionConfig(
                dim=self.dim,
                num_heads=2 * self.heads,
                block=self.block,
                top_k=self.top_k,
                window=self.window,
                predictor=None,
            ),
            "D": GatedDeltaNetConfig(dim=self.dim, num_heads=self.heads),
            "G": GatedLinearAttentionConfig(dim=self.dim, num_heads=self.heads),
            "H": HyenaConfig(dim=self.dim, packed=False),
            "T_top_k": replace(slots, top_k_states=SLOTS // 8),
            "T_levels": replace(slots, num_slots=None, levels=LEVELS),
            "T_filling": replace(slots, full=False),
        }
        if named := re.fullmatch(r"T(\d*)(_edges)?", mixer):
            engine = replace(slots, num_slots=int(named[1] or SLOTS))
            mixers[mixer] = with_edges(engine) if named[2] else engine
        used = {name: config for name, config in mixers.items() if name == mixer}
        pattern = ("hyena_short", mixer)
        stack = StackConfig(dim=self.dim, num_layers=self.layers, pattern=pattern, mixers=used, mlp_dim=0)
        return ByteLMConfig(stack=stack, vocab_size=task.vocab_size)


def recall(
    out: str,
    pairs: tuple[int, ...] = (16, 64, 256),
    mixers: tuple[str, ...] = ("H", "G", "D", "T", "T_top_k", "A"),
    seeds: int = 1,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Train small models to recall values by their keys (MQAR), and score them on rows that they have not seen.

    Args:
      out: file for the figures as JSON, written anew after each model.
      pairs: of key and value in a row, one task each.
      mixers: names of the stack's table, such as D for Gated DeltaNet and A for attention; W is attention over a window
        and S sparse attention that chooses blocks; T_top_k is T (slots) whose
        tokens write to their likeliest eighth, T64 has 64 slots in place of 128 (T32, T256, ...), T_levels has
        levels of 32, 16 and 8, T_filling has slots that take longer to be full, and T_edges or T64_edges has a
        GRU, attention among slots and routes that see them, every 64 tokens.
      seeds: models of each kind, with seeds 0, 1, ...; of several the mean is told with its 95 % interval.
      settings: of all of them.

    Raises:
      ValueError: there is no model to train, or a mixer is unknown, or named twice.
    """
    from experiments.benchmark.figures.saved import save
    from jaxblt.evaluation.tasks.baseline import majority_baseline

    if not pairs or not mixers:
        raise ValueError(f"there is nothing to train: name pairs and mixers, got {pairs} and {mixers}")
    if len(set(pairs)) < len(pairs) or len(set(mixers)) < len(mixers):
        raise ValueError(f"--pairs and --mixers must differ among themselves, got {pairs} and {mixers}")
    if seeds < 1:
        raise ValueError(
            f"--seeds must be at least 1, got {seeds}: it is how many models of each kind are trained"
        )
    tasks = {count: settings.task(count) for count in pairs}
    models = {(mixer, count): settings.model(mixer, tasks[count]) for count in pairs for mixer in mixers}
    majority = {str(count): majority_baseline(task, most=200).accuracy[0] for count, task in tasks.items()}
    figures: dict[str, Any] = {"settings": asdict(settings), "majority": majority, "runs": [], "mean": []}
    for (mixer, count), model in models.items():
        for seed in range(seeds):
            found = train(model, tasks[count], settings, seed)
            figures["runs"].append({"mixer": mixer, "pairs": count, "seed": seed, **found})
            save("recall", out, figures)
        each = [run["accuracy"] for run in figures["runs"][-seeds:]]
        figures["mean"].append({"mixer": mixer, "pairs": count, **over_seeds(each)})
        save("recall", out, figures)
    return figures


def over_seeds(accuracies: Sequence[float]) -> dict[str, float | None]:
    """Return the mean over seeds with Student's 95 % interval, cut at 0 and 1; no interval of one seed."""
    from experiments.benchmark.figures.intervals import over_seeds as student

    found = student(accuracies)
    cut = {name: end if end is None else min(max(end, 0.0), 1.0) for name, end in found.items()}
    return {"accuracy": cut["value"], "low": cut["low"], "high": cut["high"]}


def train(model: "ByteLMConfig", task: "MQAR", settings: Settings, seed: int) -> dict[str, Any]:
    """Train, and return the accuracy, what it was on each chunk's rows before their update, and the seconds."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.tasks.recall_rows import draw_rows
    from experiments.benchmark.tasks.small_models import fit, share_right

    rows = max(settings.tokens // task.length, 1)
    init, data, test = jax.random.split(jax.random.key(seed), 3)
    # Hand keys to the program as arguments: all seeds are one program, which a compilation cache finds again
    keys = jax.vmap(lambda number: jax.random.fold_in(data, number))
    drawn = lambda key: draw_rows(task, key, rows)  # noqa: E731
    chunks = (keys(first + jnp.arange(CHUNK)) for first in range(0, settings.steps - CHUNK + 1, CHUNK))
    fitted = fit(model, task.length, settings, init, chunks, drawn, enough=SOLVED)
    batches = -(-TEST_ROWS // rows)
    score = jax.jit(lambda params, key: share_right(fitted.module, params, draw_rows(task, key, rows)))
    accuracy = sum(float(score(fitted.params, key)) for key in jax.random.split(test, batches)) / batches
    return {"accuracy": accuracy, **fitted.figures, "rows": rows, "positions": task.length}
