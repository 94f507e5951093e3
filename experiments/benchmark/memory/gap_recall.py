"""Recall over gaps that no window spans: python -m experiments.benchmark gap_recall --out FILE."""

from dataclasses import asdict, replace
from typing import Any

from experiments.benchmark.figures.intervals import wilson
from experiments.benchmark.memory.gap_settings import MEMORIES, MODELS, Settings
from experiments.benchmark.memory.gap_training import compile_model, train


def gap_recall(
    out: str,
    models: tuple[str, ...] = MODELS,
    off: bool = True,
    seeds: int = 3,
    time_limit_s: float | None = None,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Train small models to recall values over gaps beyond their windows, and tests them on longer ones.

    All seeds of a model, with and without reads, are one program and are trained side by side.

    Args:
      out: file for the figures as JSON, written anew after each model.
      models: columns, of mac, mag, mal (Titans), slots, window, hyena, delta, engine and levels (a state engine of 56
        slots, and of levels of 32, 16 and 8), attention, sparse (attention to blocks that each token chooses); each is
        as large as the largest of all of these.
      off: train models with a memory a second time, with its reads held at zero.
      seeds: models of each kind, with seeds 0, 1, ...
      time_limit_s: seconds of training of a model, compilation left out, after which it is tested as it is; None sets
        none.
      settings: of all of them.

    Raises:
      ValueError: there is no model to train, or an unknown one; or a gap is too short to ask a memory for anything.
    """
    from experiments.benchmark.figures.saved import save
    from experiments.benchmark.memory.gap_models import check_gaps, equal_models
    from jaxblt.validation import number

    if not models:
        raise ValueError(f"--models names no model, choose of {MODELS}")
    if unknown := sorted(set(models) - set(MODELS)):
        raise ValueError(f"--models names {unknown}, choose of {MODELS}")
    if seeds < 1:
        raise ValueError(
            f"--seeds must be at least 1, got {seeds}: it is how many models of each kind are trained"
        )
    if time_limit_s is not None:
        number("--time-limit-s", time_limit_s, above=0)
    check_gaps(models, settings)
    told: dict[str, Any] = {"settings": asdict(settings), "reach": settings.reach}
    figures: dict[str, Any] = {**told, "chance": 1 / settings.symbols, "runs": [], "mean": []}
    sized = equal_models(MODELS, settings, settings.task.vocab_size)
    for name in models:
        withouts = (False, True) if off and name in MEMORIES else (False,)
        kinds = [(without, seed) for without in withouts for seed in range(seeds)]
        own = replace(settings, learning_rate=settings.rate_of(name))
        programs = compile_model(sized[name], own, len(kinds))
        found = train(name, programs, own, kinds, time_limit_s)
        for place, without in enumerate(withouts):
            model = {"model": name + "_off" * without, "chunk": settings.chunk}
            runs = found[place * seeds : (place + 1) * seeds]
            figures["runs"] += [{**model, **run} for run in runs]
            figures["mean"].append({**model, **over_seeds(runs)})
        print(*figures["runs"][-len(kinds) :], sep="\n", flush=True)
        save("gap_recall", out, figures)
    return figures


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return figures of all seeds together: answers are counted, the worst and the best seed stand beside them.

    `of_seeds` is the mean of the seeds' accuracies with Student's interval: seeds differ by more than answers do.
    """
    from experiments.benchmark.figures.intervals import over_seeds as student

    found = []
    for gaps in zip(*(run["gaps"] for run in runs), strict=True):
        right, asked = (sum(gap[name] for gap in gaps) for name in ("right", "asked"))
        low, high = wilson(right, asked)
        each = [gap["accuracy"] for gap in gaps]
        named = {"multiple": gaps[0]["multiple"], "gap": gaps[0]["gap"], "accuracy": right / asked}
        ends = {"low": low, "high": high, "worst": min(each), "best": max(each)}
        found.append({**named, **ends, "of_seeds": student(each)})
    return {"parameters": runs[0]["parameters"], "gaps": found}
