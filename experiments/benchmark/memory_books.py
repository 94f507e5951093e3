"""What memories save on books, by length of context: python -m experiments.benchmark memory_books DIR --out FILE."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from jaxblt.validation import check_bounds, check_fields, whole

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig
    from jaxblt.training.recipe import Recipe

Name = Literal["window", "mag", "mal", "mac", "slots"]
"""Forms of `jaxblt.models.titan`, and windows alone."""


@dataclass(frozen=True)
class Settings:
    """What all models have in common.

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
    """Trains models of one size on books, each on one device, and scores the same bytes after longer contexts.

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
    from experiments.benchmark._schema import save
    from experiments.benchmark.context import check_targets, document_nats, figures_of
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


def over_seeds(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each kind of model, from means of a book's nats over seeds."""
    from experiments.benchmark.context import figures_of

    found = []
    for name in dict.fromkeys(run["model"] for run in runs):
        kind = [run for run in runs if run["model"] == name]
        nats = dict(zip((at["context"] for at in kind[0]["contexts"]), _mean_nats(kind), strict=True))
        contexts = figures_of(nats, np.asarray(kind[0]["books"]["num_bytes"]))
        found.append({"model": name, "seeds": [run["seed"] for run in kind], "contexts": contexts})
    return found


def over_windows(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What memories save of the same bytes over windows alone of the same seed: by seed, and of all seeds together.

    Bits per byte and the share of those of windows, with 95 % intervals over books, of paired differences. Together,
    a book's nats are means over seeds: intervals do not count what seeds differ by.

    Args:
      runs: of memories; others among them are left out.
      others: runs of one setting, those of windows alone among them.
    """
    windows = {run["seed"]: run for run in others if run["model"] == "window"}
    pairs = [
        (run, windows[run["seed"]]) for run in runs if run["model"] != "window" and run["seed"] in windows
    ]
    found = []
    for name in dict.fromkeys(run["model"] for run, _ in pairs):
        kind = [pair for pair in pairs if pair[0]["model"] == name]
        groups = [[pair] for pair in kind] + [kind] * (len(kind) > 1)
        found += [{"model": name, **_saved(group)} for group in groups]
    return found


def _saved(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What memories save over windows, of means over the pairs (memory, windows)."""
    from jaxblt.evaluation import document_bits_per_byte, ratio_interval

    memories, windows = zip(*pairs, strict=True)
    lengths, num_bytes = memories[0]["contexts"], np.asarray(memories[0]["books"]["num_bytes"])
    contexts = []
    for at, memory, alone in zip(lengths, _mean_nats(memories), _mean_nats(windows), strict=True):
        less = alone - memory
        low, high = ratio_interval(less, alone)
        share = {"value": float(less.sum() / alone.sum()), "low": low, "high": high}
        bits = asdict(document_bits_per_byte(less, num_bytes))
        contexts.append({"context": at["context"], "bits_per_byte": bits, "share": share})
    return {"seeds": [memory["seed"] for memory in memories], "contexts": contexts}


def _mean_nats(runs: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """[contexts, books], over seeds."""
    return np.mean([run["books"]["nats"] for run in runs], axis=0)


def models_of(settings: Settings) -> dict[str, "ByteLMConfig"]:
    """The models, of one size."""
    from experiments.benchmark._gap_models import of_one_size

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
    """A run on books."""
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
