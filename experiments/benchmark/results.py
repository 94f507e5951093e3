"""docs/results.md and README's table, written from the JSON files of the record."""

from collections.abc import Callable
from pathlib import Path

from experiments.benchmark import (
    _adaptation_tables,
    _counter_tables,
    _length_tables,
    _memory_tables,
    _peer_tables,
    _recall_tables,
    _split_tables,
    _streamed_tables,
    _tables,
)
from experiments.benchmark._markdown import (
    Figures,
    Folder,
    count,
    flags,
    ms,
    origins,
    percent,
    prose,
    rate,
    read_folder,
    table,
)

RECORD, PAGE, README = "experiments/results", "docs/results.md", "README.md"
BEGIN, END = "<!-- Written by `python -m experiments.benchmark results`. -->", "<!-- results end -->"

SECTIONS: tuple[tuple[str, Callable[[Folder], str]], ...] = (
    ("Trained models", _tables.training),
    ("The train step of `books`", _tables.steps),
    ("Longer contexts", _tables.context),
    ("Tasks", _recall_tables.tasks),
    ("Recall", _recall_tables.recall),
    ("Recall over gaps", _recall_tables.gaps),
    ("Books with a memory", _memory_tables.books),
    ("Facts in books", _memory_tables.facts),
    ("Models with a memory", _memory_tables.titans),
    ("Longer rows than in training", _recall_tables.lengths),
    ("Promoters", _tables.promoters),
    ("Protein families", _adaptation_tables.families),
    ("Routed adapters", _adaptation_tables.mixes),
    ("What adapters cost", _adaptation_tables.speed),
    ("Searches of an adapter's index", _adaptation_tables.searches),
    ("Operations", _tables.operations),
    ("What kernels wait for", _counter_tables.kernels),
    ("FlexAttention as a peer", _tables.peers),
    ("Other peers in PyTorch", _peer_tables.peers),
    ("Blocks by length", _length_tables.blocks),
    ("A Hyena layer", _length_tables.hyena_layers),
    ("Partial attention", _tables.attention_parts),
    ("Forward passes", _tables.models),
    ("Prompts", _tables.prompts),
    ("A CPU", _tables.cpu),
    ("Streamed filters", _streamed_tables.streamed_filters),
    ("Attention over several GPUs", _split_tables.rings),
    ("Packed rows over several GPUs", _split_tables.packed),
    ("One sequence over several GPUs", _split_tables.steps),
    ("A layer over several GPUs", _split_tables.layers),
    ("Operations over several GPUs", _split_tables.ops),
    ("Planned memory of a step", _split_tables.plans),
    ("Memory against context", _memory_tables.against_context),
    ("Exchanges between GPUs", _split_tables.exchanges),
)
"""Titles, and what writes the text below them; a section without a text is left out."""


def results(root: str = ".") -> None:
    """Writes docs/results.md and README's table from experiments/results.

    Args:
      root: of the repository.

    Raises:
      FileNotFoundError: the folder has no record.
      ValueError: a file does not say on what it was measured, or README has no place for the table.
    """
    base = Path(root)
    folder = read_folder(base / RECORD)
    written = {
        base / PAGE: page(folder),
        base / README: with_table((base / README).read_text("utf-8"), folder),
    }
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        print(path)


def page(folder: Folder) -> str:
    """docs/results.md."""
    said = prose(
        "Written by `python -m experiments.benchmark results` from the JSON files in `experiments/results`. A test "
        "compares the two. Times are medians; [concepts](concepts.md) defines floor, span and MFU. "
        "[benchmark](guides/benchmark.md) says how to measure again, [known-limits](known-limits.md) what these "
        "figures do not say."
    )
    parts = [f"## {title}\n\n{text}\n" for title, section in SECTIONS if (text := section(folder))]
    return "\n".join([f"# Results\n\n{said}\n", *parts, f"## Files\n\n{files(folder)}\n"])


def files(folder: Folder) -> str:
    """Where every file's figures were measured."""
    rows = [
        (f"`{name}.json`", *origin, f"`{flags(found)}`" if flags(found) else "")
        for name, found in folder.items()
        for origin in origins(found)
    ]
    return table(("file", "device", "jax", "commit", "`XLA_FLAGS`"), rows)


def _steps_time(run: Figures) -> str:
    return f"{_tables.seen(run) / run['bytes_per_second']:.0f} s"


def _recalled(found: Figures, model: str) -> Figures:
    """Of all seeds of a model, after the longest gap."""
    (mean,) = [mean for mean in found["mean"] if mean["model"] == model]
    return max(mean["gaps"], key=lambda gap: gap["multiple"])


def _million_steps(found: Figures) -> tuple[float, float]:
    """Seconds of both passes of the kernels, and of XLA's FFTs."""
    (timed,) = (
        timed["seconds"]
        for timed in found["shapes"]["hyena_d768_1m"]["passes"]
        if timed["pass"] == "forward+backward" and "mosaic_gpu_half" in timed["seconds"]
    )
    return timed["mosaic_gpu_half"]["median"], timed["xla"]["median"]


def _gpu(found: Figures) -> str:
    """What measured it, as in H200."""
    ((device,),) = {origin[:1] for origin in origins(found)}
    return device.split()[1]


def summary(folder: Folder) -> str:
    """README's table."""
    names = ("books", "books_pulse", "books_hyena", "books_transformer", "ecoli")
    books, pulse, hyena, peer, dna = runs = [folder[name] for name in names]
    bits = {run["run"]: f"{run['evaluation']['bits_per_byte']:.3f}" for run in runs}
    base = folder["books_baselines"]["bits_per_byte"]
    markov = folder["ecoli_baselines"]["bits_per_byte"]["order-5 Markov"]
    (step,) = folder["sequence_parallel_step_4_1m"]["steps"]
    prompt = max(folder["generation"]["prompts"], key=lambda at: at["bytes"])
    cut = max(
        (at for run in folder["entropy"]["runs"] for at in run["shapes"]),
        key=lambda at: at["bytes_per_second"],
    )
    memory, alone = (
        _recalled(folder["gap_recall_mal"], "mal"),
        _recalled(folder["gap_recall_others"], "window"),
    )
    seeds = {run["seed"] for run in folder["gap_recall_mal"]["runs"]}
    ours, ffts = _million_steps(folder["long_conv_1m"])
    adapted = folder["routed_lora_conflict_seeds"]
    routed, static, told = (
        f"{adapted['arms'][arm]['bits_per_byte']:.3f}" for arm in ("imitated_traces", "static", "oracle")
    )
    rows = (
        (
            "held-out English books",
            f"`books`, BLT-Hyena, {_steps_time(books)} of steps",
            f"{bits['books']} bits per byte "
            f"(with the delta rule in {_steps_time(pulse)} {bits['books_pulse']}, "
            f"byte Hyena in {_steps_time(hyena)} of a GPU that it shared {bits['books_hyena']}, "
            f"byte Transformer in {_steps_time(peer)} {bits['books_transformer']}, xz {base['xz']:.3f})",
        ),
        (
            "held-out E. coli bases",
            f"`ecoli`, byte Hyena, {count(dna['bytes_seen'] / 1e6)} MB seen",
            f"{bits['ecoli']} bits per base (order-5 Markov {markov:.3f})",
        ),
        (
            "training",
            f"`books`, one {_gpu(books)}",
            f"{rate(books['bytes_per_second'])}, {percent(books['mfu'])} MFU",
        ),
        (
            "train step on one sequence",
            f"{count(step['bytes'])} bytes, {step['devices']} H200s",
            f"{ms(step['all']['seconds']['median'])} ms, {rate(step['bytes_per_second'])}",
        ),
        (
            "reading a prompt",
            f"{count(prompt['bytes'])} bytes, one {_gpu(folder['generation'])}",
            f"{prompt['read_seconds']['median']:.2f} s",
        ),
        ("cutting patches by entropy", f"one {_gpu(folder['entropy'])}", rate(cut["bytes_per_second"])),
        (
            "long convolution with gates and gradients",
            f"1,000,000 steps, 768 channels, one {_gpu(folder['long_conv_1m'])}",
            f"{ms(ours)} ms (FFTs {ms(ffts)} ms)",
        ),
        (
            f"recall over {memory['multiple']} times what windows reach",
            f"neural memory and windows in turns, {len(seeds)} seeds",
            f"{100 * memory['accuracy']:.1f} % right (windows alone {100 * alone['accuracy']:.1f} %)",
        ),
        (
            f"books under {len(adapted['domains'])} ciphers of {adapted['settings']['letters']} letters that change "
            "unmarked",
            "adapter of a frozen `books_512`, routed by token, taught by labels, "
            f"{adapted['settings']['steps']} steps, {adapted['seed_count']} seeds",
            f"{routed} bits per byte (static adapter {static}, adapter that is told the cipher {told})",
        ),
    )
    return table(("what", "setting", "figure"), rows)


def with_table(readme: str, folder: Folder) -> str:
    """README with its table as the record has it.

    Raises:
      ValueError: the marks around the table are missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"README.md has no {BEGIN!r} with {END!r} behind it: put both where the table belongs"
        )
    return f"{before}{BEGIN}\n{summary(folder)}\n{END}{after}"
