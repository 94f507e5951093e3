"""The figures that tables derive from a row of the record, beyond looking it up."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from experiments.benchmark.figures.paired_books import over_windows

Row = Mapping[str, Any]
MEMORIES = ("mac", "mag", "mal", "slots")
"""Models of recall over gaps and of books that have chunks."""


def bytes_seen(run: Row) -> float:
    """Return the bytes up to the step that was evaluated, which may lie behind the log's last line."""
    return run["bytes_seen"] * run["evaluation"]["step"] / run["steps"]


def seconds_in_steps(run: Row) -> float:
    """Return the seconds that the steps of those bytes took."""
    return bytes_seen(run) / run["bytes_per_second"]


def count(items: list[Any]) -> int:
    """Return how many items a list has."""
    return len(items)


def pairs_shown(arm: Row) -> float:
    """Return the share of the pairs that a stack of one kind of attention shows."""
    (share,) = arm["shown"].values()
    return share


def mean_accuracy(row: Row) -> dict[str, float]:
    """Return the mean over seeds of the share of test records that each model of labels answers right."""
    found: dict[str, list[float]] = {}
    for run in row["runs"]:
        found.setdefault(run["model"], []).append(run["accuracy"])
    return {model: sum(values) / len(values) for model, values in found.items()}


def folder_name(row: Row) -> str:
    """Return the last part of a run's folder."""
    return Path(row["run"]).name


def tokens(row: Row) -> int:
    """Return the tokens of training: positions, if examples are drawn."""
    return row["positions"] if row["tokens"] is None else row["tokens"]


def chunk(row: Row) -> Any:
    """Return the chunk of a model that has some."""
    sizes = row.get("chunk", row["settings"].get("chunk_size"))
    return sizes if row["model"].split("_")[0] in MEMORIES else None


def seeds(row: Row) -> int:
    """Return how many runs of its file are of a row's model and chunk."""
    return sum((run["model"], run["chunk"]) == (row["model"], row["chunk"]) for run in row["runs"])


def saved(row: Row) -> str | None:
    """Return what a memory saves over only windows of the same seeds after the longest context, as bits and share."""
    if row["model"] == "window":
        return None
    windows = row["folder"]["memory_books_seeds_window"]["models"]
    at = over_windows(row["folder"][row["file"]]["models"], windows)[-1]["contexts"][-1]
    bits = "{value:.4f} ({low:.4f} to {high:.4f})".format(**at["bits_per_byte"])
    return f"{bits}, {100 * at['share']['value']:.1f} %"


def commonest(row: Row) -> float:
    """Return what the commonest answer is right for, in the mean over the lengths of a file."""
    return sum(row["majority"].values()) / len(row["majority"])


def doubling_gains(row: Row) -> float:
    """Return how many times as long a ring buffer takes as doubling blocks."""
    return row["ring"] / row["doubling"]


def bytes_a_second(row: Row) -> dict[str, dict[str, float]]:
    """Return the median over calls of what the engine and `generate` write, by how requests come."""
    return {
        load: {side: median(found["bytes_per_second"]) for side, found in row[load].items()}
        for load in ("once", "waves")
        if load in row
    }


def seconds_a_sequence(row: Row) -> dict[str, float]:
    """Return seconds of Evo 2 for a row of a whole pass, on each side, and for a mutant behind a shared prefix."""
    parts, rows = row["parts"], row["setting"]["forward"][0]
    found = {side: at["seconds"] / rows for side, at in parts.get("forward", {}).items()}
    mutants = parts.get("substitutions", {}).get("ours", {})
    return found | ({"mutant": mutants["seconds"] / mutants["mutants"]} if "mutants" in mutants else {})


def pieces(row: Row) -> list[float]:
    """Return seconds of a piece with prepared taps, and with taps made in the call."""
    return list(row["seconds_a_piece"].values())


def planned(row: Row) -> int | None:
    """Return the memory that the compiler plans for a block's gradients at 65,536 tokens."""
    found = [at["planned_bytes"] for at in row["blocks"][row["mixer"]] if at["tokens"] == 65_536]
    return sum(found[0].values()) if found else None


def worst_error(row: Row) -> float:
    """Return the largest error of cuDNN's in units of XLA's."""
    return max(row["cudnn"]["errors"][x] / row["xla"]["errors"][x] for x in row["xla"]["errors"])


def longest_kernel(row: Row) -> dict[str, Any]:
    """Return the kernel of a program that takes the most time."""
    kernel = max(row["kernels"], key=lambda kernel: kernel["seconds"])
    waits = [f"{wait.replace('_', ' ')} {count:.1f}" for wait, count in kernel["waits"].items()]
    return kernel | {"share": kernel["seconds"] / row["seconds"], "waits": ", ".join(waits)}


def fastest_with_gradients(shape: Row) -> Any:
    """Return the timings of a shape with gradients: of the fastest version, and of XLA beside it."""
    timed = [list(at["seconds"].values()) for at in shape["passes"] if "+" in at["pass"]]
    return min(timed, key=lambda pair: pair[0]["median"])


def fastest(row: Row) -> dict[str, Any]:
    """Return the fastest version of a shape in each pass: names, seconds, those of XLA, their ratio, the floor."""
    best = [
        min((at for at in row["passes"] if at["pass"] == name), key=lambda at: _taken(at)[0])
        for name in dict.fromkeys(at["pass"] for at in row["passes"])
    ]
    return {
        "versions": list(dict.fromkeys(next(iter(at["seconds"])) for at in best)),
        "taken": [_taken(at)[0] for at in best],
        "plain": [_taken(at)[1] for at in best],
        "ratio": [at["time_over_plain"]["value"] for at in best],
        "floor": [at["floor"] for at in best],
        "size": shape_size(row["op"], row["shape"]),
    }


def _taken(at: Row) -> list[float]:
    return [timed["median"] for timed in at["seconds"].values()]


def shape_size(op: str, name: str) -> str:
    """Return the sizes of a shape of an operation, without those that are as in most."""
    shapes = {shape.name: shape for shape in import_module(f"pallas_kernels.{op}.shapes").SHAPES}
    shape = shapes.get(name) or shapes[name.removeprefix("pool_").removeprefix("lookup_")]
    sizes = {
        field.name.replace("_", " "): getattr(shape, field.name)
        for field in fields(shape)
        if field.default is MISSING or getattr(shape, field.name) != field.default
    }
    del sizes["name"]
    return ", ".join(
        f"{key} {size:,}" if type(size) is int else f"{key} {size}" for key, size in sizes.items()
    )
