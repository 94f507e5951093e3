"""Sections of docs/results.md on models with a memory, from files of the record."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmark._markdown import (
    Figures,
    Folder,
    count,
    gigabytes,
    percent,
    prose,
    rate,
    rounded,
    spread,
    table,
)
from experiments.benchmark.memory_books import over_windows

WORDS = {
    "attention": "attention to all",
    "window": "attention over a window",
    "mag": "window and neural memory (MAG)",
    "mal": "window, neural memory in turns (MAL)",
    "mac": "segments, neural memory (MAC)",
    "slots": "window, slots in turns",
}


def against_context(folder: Folder) -> str:
    """State in streaming and memory in training, by length of the context; nothing before it was counted."""
    found = folder.get("memory_context")
    if found is None:
        return ""
    said = prose(
        f"{found['num_layers']} layers of width {count(found['dim'])}, windows of {count(found['window'])}, chunks of "
        f"{count(found['chunk_size'])}, one row, bf16. A state is what streaming carries, counted from its shapes. Its "
        "exponent is the slope of log bytes over log length with its 95 % interval."
    )
    return f"{said}\n\n{_states(found)}\n\n{_training(found)}"


def books(folder: Folder) -> str:
    """Bits of the same bytes of books after longer contexts, with a memory and without."""
    files = [found for found in folder.values() if found.get("benchmark") == "memory_books"]
    if not files:
        return ""
    settings = files[0]["settings"]
    contexts = sorted({at["context"] for found in files for at in found["models"][0]["contexts"]})
    said = prose(
        f"{settings['num_layers']} layers of width {count(settings['dim'])}. The last {count(files[0]['targets'])} "
        "bytes of each stretch of the test books are scored. In brackets is the 95 % interval over books of what the "
        "longer context saves."
    )
    lengths = [f"{count(context)} bytes" for context in contexts]
    rows = [
        (
            *_kind(run, found),
            *(count(run[name]) if name in run else "" for name in ("parameters", "step")),
            *_at_each(contexts, run, _saved),
        )
        for found in files
        for run in (*found["models"], *(mean for mean in found.get("mean", ()) if len(mean["seeds"]) > 1))
    ]
    together = table((*KIND, "parameters", "steps", *lengths), rows)
    return "\n\n".join((said, together, *_over_windows(files, contexts)))


def facts(folder: Folder) -> str:
    """Questions on stories that are scattered over books."""
    files = {name: found for name, found in folder.items() if found.get("benchmark") == "babilong"}
    if not files:
        return ""
    lengths = sorted({at["bytes"] for found in files.values() for at in found["runs"][0]["lengths"]})
    said = prose(
        "Where somebody or something is, told in a story of bAbI that is scattered over a test book: right answers of "
        "those asked, with their 95 % interval, beside what the commonest answer is right for. Runs of the recipe "
        "`babilong`, with the steps of their last stage."
    )
    rows = [
        (
            *(f"`{name}`", WORDS[{"J": "mag", "W": "window"}[run["pattern"]]]),
            *(count(run["step"]), count(found["rows"]), _commonest(found)),
            *(next((_right(at) for at in run["lengths"] if at["bytes"] == length), "") for length in lengths),
        )
        for name, found in files.items()
        for run in found["runs"]
    ]
    head = ("file", "model", "steps", "asked", "commonest", *(f"{count(length)} bytes" for length in lengths))
    return f"{said}\n\n{table(head, rows)}"


def titans(folder: Folder) -> str:
    """A train step with memories, and decoded tokens of one memory."""
    found = folder.get("titan_speed")
    if found is None:
        return ""
    shape = found["shape"]
    files = [folder[name] for name in ("titan_speed", "titan_speed_2", "titan_speed_4") if name in folder]
    parameters, rows = count(found["steps"][0]["parameters"]), found["decoding"][0]["rows"]
    steps = [
        (
            f"{count(run['devices'])} x {file['ceilings']['machine']['device']}",
            spread(run["seconds"]),
            rate(run["bytes_per_second"]),
            # The allocator's peak is that of the process, which may have run on one GPU before
            gigabytes(run["peak_memory_bytes"]) if run["devices"] == 1 else "",
        )
        for file in files
        for run in file["steps"]
    ]
    tokens = [
        (
            *(count(at["position"]), "a chunk's last" if at["ends_chunk"] else "any other"),
            *(f"{1e3 * at['seconds_a_token']:.3f}", percent(at["share_of_bandwidth"])),
        )
        for at in found["decoding"]
    ]
    said = prose(
        f"{shape['num_layers']} layers of {WORDS[shape['form']]}, width {count(shape['dim'])}, windows of "
        f"{count(shape['window'])} and chunks of {count(shape['chunk_size'])}: {parameters} "
        f"parameters. A step takes {shape['rows']} rows of {count(shape['length'])} bytes."
    )
    read = prose(
        f"A token of one such memory for {rows} rows, and the share of the bandwidth at which it "
        "reads M once."
    )
    parts = (
        *(said, table(("GPUs", "step, ms (95 %)", "bytes/s", "memory"), steps)),
        *(read, table(("bytes before it", "token", "ms", "of the bandwidth"), tokens)),
    )
    return "\n\n".join(parts)


def _commonest(found: Figures) -> str:
    """Over the lengths of a file."""
    least, most = (percent(of(found["majority"].values())) for of in (min, max))
    return least if least == most else f"{least} to {most}"


def _right(at: Figures) -> str:
    return f"{percent(at['accuracy'])} ({percent(at['low'])} to {percent(at['high'])})"


def _saved(at: Figures) -> str:
    bits, gain = at["bits_per_byte"], at["gain"]
    return f"{bits['value']:.3f} ({gain['low']:.4f} to {gain['high']:.4f})"


KIND = ("model", "window", "chunk", "seed")


def _kind(run: Figures, found: Figures) -> tuple[str, str, str, str]:
    """`KIND` of a run, or of several together; files from before there was a choice are of seed 0."""
    seeds = run.get("seeds", [run.get("seed", 0)])
    return (
        WORDS[run["model"]],
        count(found["settings"]["window"]),
        "" if run["model"] == "window" else count(found["settings"]["chunk_size"]),
        str(seeds[0]) if len(seeds) == 1 else f"mean of {len(seeds)}",
    )


def _at_each(contexts: Sequence[int], run: Figures, cell: Callable[[Figures], str]) -> list[str]:
    """A cell for each context, empty where the run has none."""
    found = {at["context"]: cell(at) for at in run["contexts"]}
    return [found.get(context, "") for context in contexts]


def _over_windows(files: Sequence[Figures], contexts: Sequence[int]) -> tuple[str, ...]:
    """What memories save over windows alone, of the same file or of another one of the same bytes and settings."""

    def measured(found: Figures) -> tuple[Any, ...]:
        run = found["models"][0]
        at = [at["context"] for at in run["contexts"]]
        return found["settings"], found["targets"], at, run["books"]["num_bytes"]

    # Leave out older files: they have no nats of each book
    told, rows = [found for found in files if "books" in found["models"][0]], []
    for found in told:
        alike = [other for other in told if measured(other) == measured(found) and other is not found]
        # Keep the file's own runs last: of two with one seed the last is taken
        others = [run for other in (*alike, found) for run in other["models"]]
        rows += [
            (*_kind(gain, found), *_at_each(contexts, gain, _less))
            for gain in over_windows(found["models"], others)
        ]
    if not rows:
        return ()
    said = prose(
        "Bits per byte less than windows alone of the same seed, and the share of theirs, with 95 % intervals over "
        "books, which are paired. Means over seeds have intervals that do not count what seeds differ by."
    )
    return said, table((*KIND, *(f"{count(context)} bytes" for context in contexts)), rows)


def _less(at: Figures) -> str:
    bits, share = at["bits_per_byte"], at["share"]
    low, high = (f"{100 * share[end]:.1f}" for end in ("low", "high"))
    of = f"{100 * share['value']:.1f} % ({low} to {high})"
    return f"{bits['value']:.4f} ({bits['low']:.4f} to {bits['high']:.4f}), {of}"


def _states(found: Figures) -> str:
    first, last = found["lengths"][0], found["lengths"][-1]
    head = (
        "model",
        f"state at {count(first)} bytes",
        f"at {count(last)}",
        "exponent",
        "times below the KV cache",
    )
    rows = []
    for name, of in found["models"].items():
        sizes, ratios = of["state"]["bytes"], found["smaller"].get(name)
        cells = (f"{sizes[0] / 1e6:.1f} MB", f"{sizes[-1] / 1e6:,.1f} MB", _interval(of["state"]["exponent"]))
        rows.append((WORDS[name], *cells, "" if ratios is None else rounded(ratios[-1])))
    return table(head, rows)


def _training(found: Figures) -> str:
    """Train steps of the models that were compiled."""
    steps = {name: of["training"] for name, of in found["models"].items() if "training" in of}
    compiler, lengths = found["compiled_for"], found["train_lengths"]
    slower = [WORDS[name] for name, of in steps.items() if of["exponent_of_added"]["high"] < 1]
    verdict = f"slower than the context grow: {', '.join(slower)}" if slower else "no interval lies below 1"
    said = prose(
        f"A train step on one row, AdamW and full remat, as the compiler for {compiler['kind']} lays out its buffers; "
        f"no step ran. The exponent is of what longer rows add: {verdict}."
    )
    head = (
        "model",
        *(f"{count(length)} bytes" for length in lengths),
        "exponent of what is added",
        "KB a byte",
    )
    rows = [
        (
            WORDS[name],
            *(gigabytes(size) for size in of["bytes"]),
            _interval(of["exponent_of_added"]),
            f"{of['bytes_per_token'] / 1e3:.1f}",
        )
        for name, of in steps.items()
    ]
    return f"{said}\n\n{table(head, rows)}"


def _interval(of: Figures) -> str:
    return f"{of['value']:.3f} ({of['low']:.3f} to {of['high']:.3f})"
