"""Students of the run `genes`: python -m experiments.benchmark distillation --data data/genes --out FILE."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.training.recipe import Recipe

TEACHER = "genes"


@dataclass(frozen=True)
class Settings:
    """The settings that both students share, and the weight of what the teacher says.

    Attributes:
      layers: of a student; the teacher has nine of the same width.
      steps: of training.
      rows: of a step.
      length: bases of a row.
      learning_rate: the peak.
      weight: of KL(teacher || student) beside the loss of the next base. It was not tuned: nine tenths of the loss is a
        common choice.
      batches: of the test part that are scored, spread evenly over it.
    """

    layers: int = 3
    steps: int = 150
    rows: int = 4
    length: int = 256
    learning_rate: float = 2e-3
    weight: float = 9.0
    batches: int = 64

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "layers", "steps", "rows", "batches", least=1)
        check_bounds(self, "length", least=2)
        check_bounds(self, "learning_rate", "weight", above=0)


def distillation(
    data: str,
    out: str,
    work: str = "runs/benchmark/distillation",
    seeds: int = 3,
    first_seed: int = 0,
    teacher: str = TEACHER,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Train a small model on genes with the predictions of a run that comes with jaxblt, and without.

    Both students of a seed start from the same parameters and see the same rows. Figures are bits a base of the same
    bases of the test part, whose families have no gene in training.

    Args:
      data: folder of train.fa, validation.fa and test.fa, as `experiments.genes` writes them.
      out: file for the figures as JSON, written anew after each seed.
      work: folder for the runs; it must be new.
      seeds: of parameters and of the order of rows: how many, from `first_seed` on.
      first_seed: see there.
      teacher: the run.
      settings: of both students.
    """
    import jaxblt
    from experiments.benchmark.figures.over_seeds import over_seeds
    from experiments.benchmark.figures.saved import save
    from experiments.benchmark.labels.labelled_runs import new_folder, seeds_of
    from jaxblt.training.flops import count_params

    chosen, root, known = seeds_of(first_seed, seeds), new_folder(work), jaxblt.load(teacher, dtype="float32")
    rows = replace(
        known.recipe.data, paths=(f"{data}/*.fa",), seq_len=settings.length, batch_size=settings.rows
    )
    asked = {"data": rows, "max_batches": settings.batches}
    scored = known.evaluate("test", **asked)
    figures: dict[str, Any] = {
        "settings": asdict(settings),
        "teacher": {
            "run": teacher,
            "parameters": count_params(known.params)[0],
            "bits_per_byte": scored["bits_per_byte"],
        },
        "scored_bases": scored["bytes"],
        "runs": [],
    }
    for seed in chosen:
        scratch = student(replace(known.recipe, data=rows), seed, settings)
        for name, recipe in {"scratch": scratch, "distilled": taught(scratch, teacher, settings)}.items():
            found = train(recipe, root / f"{name}_{seed}", asked)
            figures["runs"].append({"model": name, "seed": seed, **found})
        figures["gain"] = over_seeds(gains(figures["runs"]))
        save("distillation", out, figures)
    return figures


def student(recipe: "Recipe", seed: int, settings: Settings) -> "Recipe":
    """Return the recipe of a shallower model of the same kind, trained from nothing."""
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.train_config import TrainConfig

    steps, model = settings.steps, recipe.model
    return replace(
        recipe,
        name="student",
        model=replace(model, stack=replace(model.stack, num_layers=settings.layers)),
        data=replace(recipe.data, seed=seed),
        optimizer=AdamWConfig(
            learning_rate=settings.learning_rate, warmup_steps=steps // 10, weight_decay=0.1
        ),
        train=TrainConfig(
            steps=steps,
            seed=seed,
            dtype="float32",
            log_every=max(steps // 5, 1),
            eval_every=0,
            checkpoint_every=steps,
            trackers=("jsonl",),
        ),
    )


def taught(recipe: "Recipe", teacher: str, settings: Settings) -> "Recipe":
    """Return a recipe whose model is also held close to a teacher's predictions, at every base."""
    from jaxblt.training.objectives.reference import ReferenceConfig

    return replace(recipe, reference=ReferenceConfig(run=teacher, weight=settings.weight))


def train(recipe: "Recipe", run_dir: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Train, and return bits a base of the test part, seconds of training and parameters."""
    import jaxblt
    from jaxblt.training.flops import count_params
    from jaxblt.training.loop import fit

    begun = time.perf_counter()
    fit(recipe, run_dir)
    seconds = time.perf_counter() - begun
    run = jaxblt.load(run_dir)
    bits = run.evaluate("test", **asked)["bits_per_byte"]
    return {"bits_per_byte": bits, "parameters": count_params(run.params)[0], "seconds": seconds}


def gains(runs: list[dict[str, Any]]) -> list[float]:
    """Return the bits a base by which the student that was taught is ahead, a seed each."""
    bits = {(run["model"], run["seed"]): run["bits_per_byte"] for run in runs}
    seeds = sorted({seed for _, seed in bits})
    return [bits["scratch", seed] - bits["distilled", seed] for seed in seeds]
