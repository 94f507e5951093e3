"""Savings by memories on books, by length of context: python -m experiments.benchmark memory_books DIR --out FILE."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jaxblt.validation import check_bounds, check_fields, whole

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig
    from jaxblt.training.recipe import Recipe

Name = Literal["window", "mag", "mal", "mac", "slots"]
"""Forms of `jaxblt.models.titan`, and only windows."""


@dataclass(frozen=True)
class Settings:
    """The settings that all models share.

    Attributes:
      recipe: of books, from which data, objective and optimiser are taken.
      dim, num_layers: of the models.
      window: bytes that attention sees.
      chunk_size: bytes from one update of a memory to the next; slots have intervals of their own.
      length: bytes of a row of training.
      rows: of a step.
      steps: of training, at most.
      time_limit_s: seconds of training of each model, after which it is scored as it is.
      max_rows: stretches of books that are scored, at most.
    """

    recipe: str = "books_transformer"
    dim: int = 512
    num_layers: int = 6
    window: int = 512
    chunk_size: int = 512
    length: int = 32_768
    rows: int = 2
    steps: int = 1600
    time_limit_s: float = 300.0
    max_rows: int = 64

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("dim", "num_layers", "window", "chunk_size", "length", "rows", "steps", "max_rows")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "time_limit_s", above=0)


def memory_books(
    run_dir: Annotated[str, tyro.conf.Positional],
    out: str,
    models: tuple[Name, ...] = ("window", "mag", "mal", "mac"),
    contexts: tuple[int, ...] = (2048, 8192, 32_768, 131_072),
    targets: int = 1024,
    seeds: int = 1,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Train models of one size on books, each on one device, and score the same bytes after longer contexts.

    A model that the folder holds goes on from there. Memories are paired with windows of the same call. Models may also
    have a call and a file each: docs/results.md pairs files of the same settings, contexts and targets.

    Args:
      run_dir: folder of the runs, one below it for each model and seed.
      out: file for the figures as JSON, written anew after each model.
      models: to train; each is as large as the largest of all that there are.
      contexts: bytes that a model is given, the scored ones included; no document may be shorter than the longest.
      targets: bytes that are scored at the end of each.
      seeds: models of each kind, with seeds 0, 1, ... of parameters and of the order of rows.
      settings: of all of them.

    Raises:
      ValueError: there is no model to train, or an option is out of range.
    """
    import jax

    import jaxblt
    from experiments.benchmark.figures.saved import save
    from experiments.benchmark.memory.paired_books import over_seeds, over_windows
    from experiments.benchmark.trained_runs.context import check_targets, document_nats, figures_of
    from jaxblt.training.flops import count_params
    from jaxblt.training.loop import fit

    if not models:
        raise ValueError("--models names no model, choose of window, mag, mal, mac, slots")
    whole("--seeds", seeds, least=1, why=": it is how many models of each kind are trained")
    check_targets(contexts, targets)
    figures: dict[str, Any] = {"settings": asdict(settings), "targets": targets, "models": []}
    sized = models_of(settings)
    for name, seed in product(dict.fromkeys(models), range(seeds)):
        folder = Path(run_dir) / f"{name}_{seed}"
        fitted = fit(recipe_of(name, sized[name], settings, seed), folder, devices=jax.devices()[:1])
        loaded = jaxblt.load(folder)
        nats, num_bytes = document_nats(loaded, contexts, targets=targets, max_rows=settings.max_rows)
        found = figures_of(nats, num_bytes)
        told = {"model": name, "seed": seed, "parameters": count_params(fitted.state.params)[0]}
        books = {"num_bytes": num_bytes.tolist(), "nats": [each.tolist() for each in nats.values()]}
        figures["models"].append({**told, "step": fitted.step, "contexts": found, "books": books})
        print(*((at["context"], round(at["bits_per_byte"]["value"], 4)) for at in found), flush=True)
        figures["mean"] = over_seeds(figures["models"])
        figures["over_windows"] = over_windows(figures["models"], figures["models"])
        save("memory_books", out, figures)
    return figures


def models_of(settings: Settings) -> dict[str, "ByteLMConfig"]:
    """Return the models, of one size."""
    from experiments.benchmark.memory.gap_models import of_one_size

    names: tuple[Name, ...] = ("window", "mag", "mal", "mac", "slots")
    return of_one_size({name: partial(_model, name, settings) for name in names}, settings.dim)


def _model(name: Name, settings: Settings, mlp_dim: int) -> "ByteLMConfig":
    from jaxblt.models import titan

    shape: Any = {"dim": settings.dim, "num_layers": settings.num_layers, "window": settings.window}
    chunk = None if name == "slots" else settings.chunk_size
    if name != "window":
        return titan(name, **shape, chunk_size=chunk, mlp_dim=mlp_dim)
    beside = titan("mal", **shape, chunk_size=chunk, mlp_dim=mlp_dim)
    mixers = {"W": beside.stack.mixers["W"]}
    return replace(beside, stack=replace(beside.stack, pattern="W", mixers=mixers))


def recipe_of(name: str, model: "ByteLMConfig", settings: Settings, seed: int) -> "Recipe":
    """Return a run on books."""
    import configs

    base = configs.get(settings.recipe)
    train = replace(
        base.train,
        steps=settings.steps,
        eval_every=0,
        checkpoint_every=settings.steps,
        time_limit_s=settings.time_limit_s,
        seed=seed,
    )
    data = replace(base.data, seq_len=settings.length, batch_size=settings.rows, seed=seed)
    return replace(base, name=f"memory_books_{name}_{seed}", model=model, data=data, train=train)
