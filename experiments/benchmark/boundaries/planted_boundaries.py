"""Learned boundaries on texts with planted ones: python -m experiments.benchmark planted_boundaries DIR --out FILE."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.evaluation.planted import Kind, Planted
    from jaxblt.models import BLTConfig, StackConfig
    from jaxblt.patching.learned import BoundaryConfig
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.start.setup import Setup
    from jaxblt.training.state import TrainState

Case = Literal[
    "content", "entropy", "given_motif", "learned_motifs", "hybrid_runs", "hybrid_regions", "hybrid_motifs"
]
"""A strategy on one set."""
SETS: dict[str, "Kind"] = {
    "content": "runs",
    "hybrid_runs": "runs",
    "entropy": "regions",
    "hybrid_regions": "regions",
    "given_motif": "motifs",
    "learned_motifs": "motifs",
    "hybrid_motifs": "motifs",
}
BEST: dict[Case, Case] = {
    "hybrid_runs": "content",
    "hybrid_regions": "entropy",
    "hybrid_motifs": "given_motif",
}
"""The single score that a mixture is compared with on its set."""
LENGTH, DIM, WINDOW = 256, 32, 16
"""Bytes of a row, width of bytes and patches, and bytes that attention sees."""
TEXTS, HELD_OUT = 2048, 32
"""Texts of training, and those that are scored."""


@dataclass(frozen=True)
class Settings:
    """The settings that all cases share.

    Attributes:
      seeds: models of each case, with seeds 0, 1, ... of parameters and of the order of rows.
      steps: of training.
      entropy_steps: of the entropy models' training.
      rows: of a step.
      learning_rate: the peak, after a fifth of the steps.
      ratio_weight: of the ratio loss. At H-Net's .03 the rate of cuts swings in the first steps, and a model in three
        was not back at the target after 120.
      router_rate: factor of the router's learning rate where it does not score by the encoder alone. Early on patches
        tell nothing, so the loss shuns them: at the full rate it unlearns motifs that were right before the first step.
    """

    seeds: int = 3
    steps: int = 120
    entropy_steps: int = 300
    rows: int = 8
    learning_rate: float = 3e-3
    ratio_weight: float = 0.3
    router_rate: float = 0.03

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "seeds", "rows", least=1)
        check_bounds(self, "steps", "entropy_steps", least=5)
        check_bounds(self, "learning_rate", "ratio_weight", "router_rate", above=0)


def planted_boundaries(
    run_dir: Annotated[str, tyro.conf.Positional],
    out: str,
    cases: tuple[Case, ...] = (
        "content",
        "entropy",
        "given_motif",
        "learned_motifs",
        "hybrid_runs",
        "hybrid_regions",
        "hybrid_motifs",
    ),
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Train small models whose routers cut texts with known boundaries, and compare the cuts: F1, by seed.

    Seeds of a case share one compiled step. Each model is told the set's mean distance between boundaries. Scores
    are those of bytes with p above 1/2, before and after training, beside random cuts at the same rate.

    Args:
      run_dir: folder of the entropy models' runs, which are trained where they are needed and not finished.
      out: file for the figures as JSON, written anew after each case.
      cases: strategies on sets; "hybrid_runs" mixes all three scores on the set of "content", and so on.
      settings: of all of them.
    """
    from experiments.benchmark.figures.saved import save
    from jaxblt.evaluation import planted

    figures: dict[str, Any] = {"settings": asdict(settings), "cases": {}}
    for case in dict.fromkeys(cases):
        kind = SETS[case]
        texts, held = (
            planted(kind, documents=n, length=LENGTH, seed=seed) for n, seed in ((TEXTS, 0), (HELD_OUT, 1))
        )
        reads = router_of(case).reads_entropies
        folder = _entropy_run(Path(run_dir) / kind, texts, settings) if reads else None
        figures["cases"][case] = measure_case(case, texts, held, folder, settings)
        figures["behind_best"] = behind_best(figures["cases"])
        save("planted_boundaries", out, figures)
    return figures


def measure_case(
    case: Case, texts: "Planted", held: "Planted", entropy_run: str | None, settings: Settings
) -> dict[str, Any]:
    """Train a case from each seed, and return the agreement of its cuts with the planted boundaries."""
    from experiments.benchmark.boundaries.side_by_side import train_seeds
    from experiments.benchmark.figures.over_seeds import over_seeds

    recipe = recipe_of(case, texts, entropy_run, settings)
    look = partial(agreement, held)
    trained = train_seeds(recipe, range(settings.seeds), every=20, source=texts.source, look=look)
    after = look(trained.setup, trained.states)
    return {
        "set": SETS[case],
        "bytes_per_boundary": recipe.bytes_per_patch,
        "f1": over_seeds([one["f1"] for one in after]),
        "f1_before": over_seeds([one["f1"] for one in trained.before]),
        "seeds": after,
        "step_ms": 1e3 * trained.step_seconds,
        "start_seconds": trained.start_seconds,
        "curve": trained.curve,
    }


def router_of(case: Case) -> "BoundaryConfig":
    """Return the router of a case."""
    from jaxblt.evaluation.planted import MOTIF
    from jaxblt.patching.learned import BoundaryConfig

    motifs: Any = {"motifs": (MOTIF.decode(),)}
    if case == "content":
        return BoundaryConfig()
    if case == "entropy":
        return BoundaryConfig(strategy="entropy_based")
    if case == "given_motif":
        return BoundaryConfig(strategy="pattern_aware", **motifs)
    if case == "learned_motifs":
        length = len(MOTIF)
        return BoundaryConfig(strategy="pattern_aware", learned_motifs=4, motif_length=length)
    parts = ("content_similarity", "entropy_based", "pattern_aware")
    return BoundaryConfig(strategy="adaptive_hybrid", parts=parts, **motifs)


def recipe_of(case: Case, texts: "Planted", entropy_run: str | None, settings: Settings) -> "Recipe":
    """Return the training of a case."""
    from jaxblt.patching import PatcherConfig

    router = replace(router_of(case), ratio_weight=settings.ratio_weight)
    slow = router.strategy != "content_similarity"
    return _base(
        settings,
        settings.steps,
        rates=(("router/*", settings.router_rate),) if slow else (),
        name=case,
        model=_model(router),
        patcher=PatcherConfig(mode="learned", block_size=LENGTH),
        bytes_per_patch=1 / float(np.mean(np.concatenate(texts.boundaries))),
        entropy_run=entropy_run,
    )


def agreement(held: "Planted", setup: "Setup", states: "Sequence[TrainState]") -> list[dict[str, float]]:
    """Return how the cuts of each model agree with the boundaries of texts that it has not seen."""
    import jax
    import jax.numpy as jnp

    from jaxblt.data import Batch
    from jaxblt.data.vocab import encode
    from jaxblt.evaluation import score_boundaries
    from jaxblt.training.step import find_entropies

    rows = [encode(text, bos=True) for text in held.source.documents]
    ids = np.stack(rows).astype(np.int32)
    ones, places = (
        np.ones_like(ids[:, 1:]),
        np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids[:, 1:].shape),
    )
    batch = Batch(*map(jnp.asarray, (ids[:, :-1], ids[:, 1:], ones, places, ones)))
    reference = np.pad(np.stack(held.boundaries), ((0, 0), (1, 0)))[:, :-1]

    @jax.jit
    def route(state: "TrainState", batch: Any) -> Any:
        entropies = find_entropies(setup.eval_task, state.frozen, batch)
        options = {"segment_ids": batch.segment_ids, "entropies": entropies, "method": "route"}
        return setup.task.model.apply({"params": state.params}, batch.inputs, **options)[0]

    with jax.set_mesh(setup.mesh):
        found = [np.asarray(route(state, batch)) > 0.5 for state in states]
    return [asdict(score_boundaries(cuts, reference)) for cuts in found]


def _entropy_run(folder: Path, texts: "Planted", settings: Settings) -> str:
    """Return the folder of an entropy model that is trained on the texts.

    Hashed n-grams tell it that a word is repeated, which attention would learn much later.
    """
    from jaxblt.models import ByteLMConfig, HashConfig
    from jaxblt.training.loop import fit

    model = ByteLMConfig(stack=_window(1), hash=HashConfig(sizes=(4, 6, 8), table_size=16_384))
    fit(
        _base(settings, settings.entropy_steps, name="planted_entropy", model=model),
        folder,
        source=texts.source,
    )
    return str(folder)


def _base(
    settings: Settings, steps: int, rates: tuple[tuple[str, float], ...] = (), **options: Any
) -> "Recipe":
    from jaxblt.data import DataConfig
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.train_config import TrainConfig

    data = DataConfig(seq_len=LENGTH, batch_size=settings.rows, split="documents", partial="drop", eos=False)
    train = TrainConfig(steps=steps, dtype="float32", log_every=100, eval_every=0, checkpoint_every=steps)
    rate = settings.learning_rate
    optimizer = AdamWConfig(learning_rate=rate, warmup_steps=steps // 5, rates=rates)
    return Recipe(data=data, train=train, optimizer=optimizer, **options)


def _model(router: "BoundaryConfig") -> "BLTConfig":
    from jaxblt.mixers import GatedRecurrenceConfig
    from jaxblt.models import BLTConfig, StackConfig

    latent = StackConfig(
        dim=DIM, num_layers=1, pattern="R", mlp_dim=2 * DIM, mixers={"R": GatedRecurrenceConfig(dim=DIM)}
    )
    return BLTConfig(
        encoder=_window(1),
        latent=latent,
        decoder=_window(1),
        hash=None,
        bridge_heads=2,
        features_enter="output",
        router=router,
        tie_head=False,
    )


def _window(layers: int) -> "StackConfig":
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import StackConfig

    window = AttentionConfig(dim=DIM, num_heads=2, window=WINDOW)
    return StackConfig(dim=DIM, num_layers=layers, pattern="W", mlp_dim=2 * DIM, mixers={"W": window})


def behind_best(cases: dict[str, Any]) -> dict[str, Any]:
    """Return F1 of each mixture less that of the single score, paired by seed, where both are there."""
    from experiments.benchmark.figures.over_seeds import over_seeds

    f1 = {case: [one["f1"] for one in found["seeds"]] for case, found in cases.items()}
    pairs = [(mixed, best) for mixed, best in BEST.items() if mixed in f1 and best in f1]
    return {
        mixed: over_seeds([a - b for a, b in zip(f1[mixed], f1[best], strict=True)]) for mixed, best in pairs
    }
