"""Sections of docs/results.md on runs of tasks side by side, and on blocks by length."""

from pathlib import Path

from experiments.benchmark._markdown import Figures, Folder, count, gigabytes, ms, prose, table

PASSES = ("forward", "forward+backward")


def _of(folder: Folder, benchmark: str) -> list[tuple[str, Figures]]:
    return [(name, found) for name, found in folder.items() if found.get("benchmark") == benchmark]


def _cell(figures: Figures, name: str) -> str:
    return "" if figures.get(name) is None else f"{100 * figures[name]:.1f} %"


def _solved(figures: Figures) -> str:
    subtasks = sum(name.startswith("exact_match_") for name in figures)
    return f"{figures['solved']} of {subtasks}" if "solved" in figures else ""


def _score(found: Figures) -> tuple[str, ...]:
    return (
        *(_cell(found, name) for name in ("accuracy", "exact_match", "worst")),
        _solved(found),
    )


def tasks(folder: Folder) -> str:
    """Runs of one task side by side, and always the commonest answer."""
    rows = []
    for name, found in _of(folder, "tasks"):
        split = found.get("split", "test")
        task = found["task"] if split == "test" else f"{found['task']}, {split}"
        for run in found["runs"]:
            pattern = run["pattern"] if isinstance(run["pattern"], str) else " ".join(run["pattern"])
            taken = [run[key] for key in ("parameters", "step", "tokens")]
            rows.append(
                (
                    *(f"`{name}`", task, f"`{Path(run['run']).name}`", f"`{pattern}`"),
                    *("" if x is None else count(x) for x in taken),
                    "" if run["minutes"] is None else f"{run['minutes']:.1f}",
                    *_score(run["scores"]),
                )
            )
        always = (f"`{name}`", task, "always the commonest", *([""] * 5))
        rows.append((*always, *_score(found["majority"])))
    if not rows:
        return ""
    head = ("file", "task", "run", "pattern", "parameters", "steps", "tokens", "minutes", "right", "mean")
    said = prose(
        "Answers on the test split unless another is named, after the training that the row tells. The mean counts "
        "each subtask alike, as the share of rows without a wrong answer. A subtask is solved above 95 %. The "
        "commonest answer is that of training, of each subtask apart."
    )
    return f"{said}\n\n{table((*head, 'worst', 'solved'), rows)}"


def _memory(planned: Figures) -> str:
    """Bytes of a program that gradients need: what is given, what is returned, and what is between."""
    return gigabytes(sum(planned.values()))


def _exponent(found: Figures | None) -> str:
    return "" if found is None else f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _passed(found: Figures | None) -> str:
    """The length from which a block is faster, with the ends of its interval; an end of None is no length."""
    if found is None:
        return ""
    value, low, high = (
        "never" if found[end] is None else count(found[end]) for end in ("value", "low", "high")
    )
    return value if value == "never" and low == high == "never" else f"{value} ({low} to {high})"


def blocks(folder: Folder) -> str:
    """A block of each mixer by length."""
    text = []
    for name, found in _of(folder, "scaling"):
        rows = [
            (
                *(f"`{mixer}`", count(at["tokens"])),
                *(ms(at[p]["median"]) for p in PASSES),
                *(f"{1e6 / at[p]['tokens_per_second']:.2g}" for p in PASSES),
                *(_memory(at[kind]) for kind in ("planned_bytes", "planned_bytes_with_remat")),
            )
            for mixer, timed in found["blocks"].items()
            for at in timed
        ]
        head = (
            "mixer",
            "tokens",
            "forward, ms",
            "with gradients, ms",
            "µs a token",
            "with gradients, µs a token",
        )
        lengths = table((*head, "planned memory", "with remat"), rows)
        grown = [
            (
                *(f"`{mixer}`", count(found["parameters"][mixer])),
                *(_exponent(found["growth"][mixer][p]) for p in PASSES),
                *(_passed(found["crossover"].get(mixer, {}).get(p)) for p in PASSES),
            )
            for mixer in found["blocks"]
        ]
        head = ("mixer", "parameters", "exponent, forward", "exponent, with gradients")
        ends = ("faster than attention from, forward", "faster than attention from, with gradients")
        said = prose(
            f"`{name}`: a block with its MLP, one row, width {count(found['dim'])}, bf16. `T32` to `T256` are state "
            "engines of so many slots. Exponents of time in length are fitted from 16,384 tokens on, with their 95 % "
            "interval."
        )
        text.append(f"{said}\n\n{lengths}\n\n{table((*head, *ends), grown)}")
    return "\n\n".join(text)
