"""Sections of docs/results.md on what small models recall, over gaps and on longer rows, from files of the record."""

from pathlib import Path

from experiments.benchmark._markdown import Figures, Folder, count, percent, prose, table
from experiments.benchmark.gap_recall import MEMORIES


def recall(folder: Folder) -> str:
    """Pairs that small models recall, by mixer."""
    files = {n: found for n, found in folder.items() if n == "recall" or n.startswith("recall_")}
    head = ("file", "mixer", "pairs", "seed", "rate", "right", "always the commonest", "parameters", "steps")
    rows = [
        (
            *(f"`{name}`", f"`{run['mixer']}`", str(run["pairs"]), str(run["seed"])),
            *(
                f"{found['settings']['learning_rate']:g}",
                f"{100 * run['accuracy']:.2f} %",
                percent(found["majority"][str(run["pairs"])]),
            ),
            *(count(run["parameters"]), count(run["steps"])),
        )
        for name, found in files.items()
        for run in found["runs"]
    ]
    settings = folder["recall"]["settings"]
    said = prose(
        f"Multi-query recall on rows that the models have not seen, {settings['layers']} layers of width "
        f"{settings['dim']}. Training ends where almost all answers are right, or after {count(settings['steps'])} "
        "steps. In files `recall_start*` Gated DeltaNet, gated linear attention and slots start otherwise than in "
        "the others."
    )
    return f"{said}\n\n{table(head, rows)}"


def tasks(folder: Folder) -> str:
    """Runs side by side on the test split of their task."""
    files = [found for name, found in folder.items() if name.startswith("tasks_")]
    if not files:
        return ""
    head = (
        "task",
        "run",
        "pattern",
        "right",
        "commonest",
        "solved",
        "parameters",
        "steps",
        "tokens",
        "minutes",
    )
    rows = [
        (
            *(f"`{found['task']}`", Path(run["run"]).name, f"`{run['pattern']}`"),
            *(f"{100 * run['scores']['accuracy']:.1f} %", percent(found["majority"]["accuracy"])),
            *(str(run["scores"].get("solved", "")), count(run["parameters"]), count(run["step"])),
            count(run["positions"] if run["tokens"] is None else run["tokens"]),
            f"{run['minutes']:.2g}",
        )
        for found in files
        for run in found["runs"]
    ]
    said = prose(
        "Questions of the test split that a run answered right, and those that the commonest answer of its subtask "
        "gets right. A subtask is solved where over 95 % are. Tokens are those of training, without padding "
        "but of examples that are drawn."
    )
    return f"{said}\n\n{table(head, rows)}"


def gaps(folder: Folder) -> str:
    """What is recalled over gaps that no window spans, by model and seed."""
    files = {name: found for name, found in folder.items() if name.startswith("gap_recall")}
    if not files:
        return ""
    runs = [run for found in files.values() for run in found["runs"]]
    multiples = sorted({gap["multiple"] for run in runs for gap in run["gaps"]})
    told = ("file", "model", "chunk", "seed", "parameters", "steps", "reach", "shortest gap")
    rows = [
        (
            *(f"`{name}`", f"`{run['model']}`", _chunk(run)),
            *(str(run["seed"]), count(run["parameters"])),
            *(count(run.get("steps", found["settings"]["steps"])), count(found["reach"]), _shortest(found)),
            *(_accuracy(run, multiple) for multiple in multiples),
        )
        for name, found in files.items()
        for run in found["runs"]
    ]
    head = (*told, *(f"{n} x" for n in multiples))
    said = prose(
        "Values by their keys, after gaps of so many times what a stack of windows reaches. The shortest gap is that "
        "of training. `_off` has a memory whose reads are held at zero."
    )
    over = "Answers of all seeds of a file together, with a 95 % interval that does not count what seeds differ by:"
    means = [
        (f"`{name}`", f"`{of['model']}`", *(_interval(of, multiple) for multiple in multiples))
        for name, found in files.items()
        for of in found["mean"]
    ]
    together = table(("file", "model", *(f"{n} x" for n in multiples)), means)
    return f"{said}\n\n{table(head, rows)}\n\n{over}\n\n{together}\n\n{_chunks(folder)}"


def _chunks(folder: Folder) -> str:
    """Recall, bits of books and speed by the length of a memory's chunks."""
    recalls = [found for name, found in folder.items() if name.startswith("gap_recall_chunks_")]
    saved = {
        found["settings"]["chunk_size"]: (
            found.get("mean", found["models"])[0]["contexts"][-1],
            found["settings"],
        )
        for name, found in folder.items()
        if name.startswith("memory_books_chunks_")
    }
    multiples = [gap["multiple"] for gap in recalls[0]["runs"][0]["gaps"]] if recalls else []
    head = (
        "chunk",
        *(f"recall, {n} x" for n in multiples),
        "tokens/s in training",
        "bits of books",
        "their window",
    )
    rows = [
        (
            *(count(of["chunk"]), *(_interval(of, multiple) for multiple in multiples)),
            count(round(found["runs"][0]["tokens_per_second"][-1])),
            *_bits(saved.get(of["chunk"])),
        )
        for found in sorted(recalls, key=lambda found: found["mean"][0]["chunk"])
        for of in found["mean"]
    ]
    said = prose(
        "By the length of a memory's chunks: the means above, tokens a second of all seeds together at the last stage "
        "beside other runs, and bits of books after the longest context of `memory_books_chunks_*`."
    )
    return f"{said}\n\n{table(head, rows)}" if rows else ""


def _bits(found: tuple[Figures, Figures] | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    at, settings = found
    return f"{at['bits_per_byte']['value']:.3f}", count(settings["window"])


def _chunk(run: Figures) -> str:
    return count(run["chunk"]) if run["model"].removesuffix("_off") in MEMORIES else ""


def _interval(of: Figures, multiple: int) -> str:
    found = [gap for gap in of["gaps"] if gap["multiple"] == multiple]
    return " ".join(
        f"{percent(gap['accuracy'])} ({percent(gap['low'])} to {percent(gap['high'])})" for gap in found
    )


def _shortest(found: Figures) -> str:
    shortest = found["settings"]["shortest"]
    return count(found["reach"] + 1 if shortest is None else shortest)


def _accuracy(run: Figures, multiple: int) -> str:
    found = [gap["accuracy"] for gap in run["gaps"] if gap["multiple"] == multiple]
    return percent(found[0]) if found else ""


def _model(task: str, settings: Figures) -> str:
    if task == "copy":
        return "neural Turing machine"
    # files from before there was a choice are of gated ones
    return "gated " * settings.get("gated", True) + "delta rule, factors of -1..1"


def lengths(folder: Folder) -> str:
    """What small models do on rows longer than those of their training."""
    files = [found for name, found in folder.items() if name.startswith("length_generalisation")]
    if not files:
        return ""
    rows = [
        (
            *(
                run["task"],
                _model(run["task"], found["settings"]),
                count(found["settings"]["layers"]),
                str(run["seed"]),
            ),
            *(count(run["parameters"]), count(run["steps"])),
            *(
                cell
                for where in ("trained", "longer")
                for at in (run["lengths"][where],)
                for cell in (count(at["positions"]), percent(at["accuracy"]), percent(at["exact"]))
            ),
        )
        for found in files
        for run in found["runs"]
    ]
    head = ("task", "model", "layers", "seed", "parameters", "steps")
    each = ("positions", "right", "whole rows")
    said = prose(
        "Copies of symbols and parities of bits: test rows of the lengths of training, and rows four and six times as "
        "long."
    )
    return f"{said}\n\n{table((*head, *each, *each), rows)}"
