"""Sections of docs/results.md that one GPU or a CPU measured, each from files of the record."""

from collections.abc import Iterator
from statistics import fmean

from experiments.benchmark._markdown import (
    Figures,
    Folder,
    count,
    gigabytes,
    ms,
    percent,
    prose,
    rate,
    rounded,
    runs,
    spread,
    table,
)

MODELS = {
    "books": "BLT-Hyena on patches, 117.6 M parameters and 30.7 M in hash tables; no validation meanwhile",
    "books_seed_1": "the same, seed 1",
    "books_filled": "seed 0 in an earlier run (commit 0b3ecaa), no validation",
    "books_1016_slots": "seed 0 before, 1,016 slots a block, with validation",
    "books_1016_slots_seed_1": "seed 1 before, 1,016 slots a block, with validation",
    "books_hyena": "byte Hyena, modal filters, 114.5 M parameters; beside `books_hyena_implicit` on one GPU",
    "books_hyena_alone_4300": "byte Hyena, modal filters, alone on the GPU, 4,300 steps",
    "books_hyena_implicit": "byte Hyena, implicit filters, 114.9 M parameters; beside `books_hyena` on one GPU",
    "books_hyena_alone": "byte Hyena, modal filters, alone on the GPU; 1,072 of 1,100 steps",
    "books_hyena_implicit_alone": "byte Hyena, implicit filters, alone on the GPU; 597 of 1,100 steps",
    "books_hyena_implicit_alone_3600": "byte Hyena, implicit filters, alone on the GPU, 3,600 steps",
    "books_pulse": "`books` with Gated DeltaNet for Hyena, 123.8 M parameters and 30.7 M in hash tables; no validation",
    "books_pulse_seed_1": "the same, seed 1",
    "books_transformer": "byte Transformer, 114.1 M parameters",
    "ecoli": "byte Hyena, both strands, 14.4 M parameters",
}
OPS = (
    *(
        "attention",
        "blocked_conv",
        "blocked_conv_8191",
        "blocked_conv_packed",
        "byte_head",
        "gated_delta_rule",
        "gated_delta_rule_8_heads",
        "gated_delta_rule_decode",
        "gated_linear_attention",
        "gated_linear_attention_cut",
        "gated_linear_attention_decode",
        "gated_linear_attention_few_heads",
        "gated_linear_attention_few_rows",
        "gated_linear_attention_few_rows_2",
        "gated_linear_attention_h100",
        "gated_linear_attention_key",
        "gated_linear_attention_pulse",
        "gated_linear_attention_slots",
        "gated_linear_attention_stretches",
        "hash_embedding",
        "linear_scan",
        "long_conv",
        "long_conv_1m",
        "long_conv_1m_groups",
        "long_conv_40000",
        "long_conv_between",
        "long_conv_both_ways",
        "long_conv_classes",
        "long_conv_few",
        "long_conv_flat",
        "long_conv_half",
        "long_conv_long",
        "long_conv_odd",
        "long_conv_one_pass",
        "long_conv_packed",
        "long_conv_padded",
        "long_conv_quiet",
        "long_conv_short",
        "long_conv_toeplitz",
        "modal_conv",
        "modal_conv_2047",
        "modal_conv_any_length",
        "modal_conv_books",
        "modal_conv_d768_8k",
        "modal_conv_packed",
        "modal_conv_packed_h200",
        "modal_conv_tiles",
        "neural_memory",
        "neural_memory_h100",
    ),
    *(
        "patch_attention_lookup",
        "patch_attention_pool",
        "routed_lora",
        "routed_lora_banks",
        "routed_lora_channels_first",
        "routed_lora_rows",
        "short_conv",
        "short_conv_8191",
        "short_conv_packed",
    ),
)


def training(folder: Folder) -> str:
    """Runs of recipes, and what they are compared with."""
    head = (
        "recipe",
        "model",
        "bytes seen",
        "in steps",
        "bytes/s",
        "MFU",
        "memory",
        "bits a byte, test split",
    )
    found = [(folder[name], model) for name, model in MODELS.items()]
    rows = [
        (
            *(f"`{run['run']}`", model, count(seen(run))),
            *(f"{seen(run) / run['bytes_per_second']:.0f} s", rate(run["bytes_per_second"])),
            *(percent(run["mfu"]), gigabytes(run["peak_memory_bytes"])),
            f"{run['evaluation']['bits_per_byte']:.3f}",
        )
        for run, model in found
    ]
    base = [
        (f"`{folder[name]['data_of']}`", method, f"{bits:.3f}")
        for name in ("books_baselines", "ecoli_baselines")
        for method, bits in folder[name]["bits_per_byte"].items()
    ]
    return (
        "One run of seed 0 each where no other is named. For `ecoli` a byte is a base.\n\n"
        f"{table(head, rows)}\n\nBaselines on the same test splits:\n\n"
        f"{table(('data', 'method', 'bits a byte'), base)}"
    )


def seen(run: Figures) -> float:
    """Bytes up to the step that was evaluated, which may lie behind the log's last line."""
    return run["bytes_seen"] * run["evaluation"]["step"] / run["steps"]


def steps(folder: Folder) -> str:
    """Speed of `books` at several commits."""
    rows = [
        (
            run["commit"][:12],
            "yes" if run["scan"] else "no",
            str(line["step"]),
            rate(line["bytes_per_second"]),
            percent(line["mfu"]),
        )
        for run in folder["books_steps"]["runs"]
        for line in run["lines"][:1]
    ]
    share = folder["books_patching_share"]
    return (
        f"{table(('commit', 'scanned stacks', 'steps', 'bytes/s', 'MFU'), rows)}\n\n"
        f"Entropies made inside the step take {100 * share['share']:.1f} % of it "
        f"({100 * share['share_low']:.1f} to {100 * share['share_high']:.1f}): "
        f"{ms(share['online_seconds']['median'])} ms with them, {ms(share['given_seconds']['median'])} ms without."
    )


def context(folder: Folder) -> str:
    """The same bytes after longer contexts, run by run, and what the longer ones gain."""
    rows = [
        (
            *(f"`{name}`", f"`{run['run']}`, step {run['step']}", count(at["context"])),
            *(_interval(at["bits_per_byte"]), _interval(at["gain"])),
        )
        for name, run in folder.items()
        if "contexts" in run and "targets" in run
        for at in run["contexts"]
    ]
    return table(
        ("file", "run", "bytes of context", "bits a byte (95 %)", "gain over the shortest (95 %)"), rows
    )


def _interval(value: Figures) -> str:
    return f"{value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def promoters(folder: Folder) -> str:
    """Return the section on promoters of E. coli: fine-tuning, and what needs no pretraining."""
    files = [found for name, found in folder.items() if name.startswith("promoter")]
    if not files:
        return ""
    by_seed = {(run["model"], run["seed"]): run for found in files for run in found["runs"]}
    models = list(dict.fromkeys(model for model, _ in by_seed))
    records = files[0]["records"]
    said = (
        f"{records['promoter']} promoters among {count(records['other'])} other sequences of 81 bases (Umarov and "
        "Solovyev 2016). Sequences that have a 21-mer in common lie in one part. A seed picks the split, and figures "
        "are of its test tenth. `markov` is an order-3 model of each class, `nearest` the class of the sequence that "
        "shares the most words, `kmers` a logistic regression on words."
    )
    if "finetuned" in models:
        said += " `finetuned` and `probe` start from `ecoli`, whose genome holds the sequences without their labels."
    rows = [
        _of_seeds(model, [run for (name, _), run in by_seed.items() if name == model]) for model in models
    ]
    head = ("model", "seeds", "accuracy", "MCC (least to most)", "AUROC (least to most)")
    return f"{prose(said)}\n\n{table(head, rows)}"


def _of_seeds(model: str, found: list[Figures]) -> tuple[str, ...]:
    """Return a row of means over seeds."""

    def told(name: str) -> str:
        of = [run[name] for run in found]
        return f"{fmean(of):.3f} ({min(of):.3f} to {max(of):.3f})"

    accuracy = percent(fmean(run["accuracy"] for run in found))
    return model, str(len(found)), accuracy, told("mcc"), told("auroc")


def operations(folder: Folder) -> str:
    """Every op's benchmark."""
    said = prose(
        "Device time. *Plain* is what one would write without the op; the two alternate. The floor is bytes over copy "
        "bandwidth or FLOPs over matmul speed, measured in the same run."
    )
    head = ("shape", "pass", "version", "ms", "plain, ms", "time over plain (95 %)", "floor, ms")
    parts = [f"{said}\n"]
    for name in OPS:
        rows = [row for run in runs(folder[name]) for row in _op_rows(run)]
        parts.append(f"### `{name}`\n\n{table(head, rows)}\n")
    return "\n".join(parts).rstrip()


def _op_rows(run: Figures) -> Iterator[tuple[str, ...]]:
    for shape, found in run["shapes"].items():
        for timed in found["passes"]:
            (version, taken), (_, plain) = timed["seconds"].items()
            ratio = timed["time_over_plain"]
            over = f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
            name = timed["pass"].replace("+", " + ")
            times = (ms(taken["median"]), ms(plain["median"]), over, ms(timed["floor"]))
            yield (shape, name, version, *times)


def peers(folder: Folder) -> str:
    """FlexAttention of PyTorch on the shapes of patch attention."""
    found = folder["flex_attention"]
    rows = [
        (shape, name.replace("+", " + "), rounded(flex), rounded(call["dense_ms"][name]))
        for shape, call in found["calls"].items()
        for name, flex in call["flex_ms"].items()
    ]
    return f"PyTorch {found['torch']}.\n\n" + table(
        ("shape", "pass", "FlexAttention, ms", "dense mask, ms"), rows
    )


def attention_parts(folder: Folder) -> str:
    """Partial attention: kernels of a ring's step, by name."""
    found = folder["attention_parts"]
    if "calls" in found:
        names, rows = (found["first"], found["second"]), _partial_rows(found["calls"])
    else:
        names = ("mosaic_gpu", "cudnn with a merge")
        rows = [(at["time"], *at["ms"].values(), at["ratio"][0]) for at in found["lines"] if "time" in at]
    cells = [(call, rounded(first), rounded(second), f"{ratio:.3f}") for call, first, second, ratio in rows]
    return table(("call", *(f"{name}, ms" for name in names), "ratio"), cells)


def _partial_rows(calls: list[Figures]) -> list[tuple[str, float, float, float]]:
    return [
        (
            f"{name} {call['tokens']}x{call['keys']}, {call['heads']} heads of {call['head_dim']}, "
            f"causal={call['causal']} accumulate={call['accumulate']}",
            *(call[name]["ms"][side] for side in ("first", "second")),
            call[name]["ratio"]["value"],
        )
        for call in calls
        for name in ("forward", "gradients")
    ]


def models(folder: Folder) -> str:
    """Forward passes of whole models."""
    stack = [
        (
            *(
                f"{run['layers']} modal Hyena layers with MLPs, D {run['dim']}",
                f"{at['rows']} x {count(at['tokens'])}",
            ),
            *(spread(at["seconds"]), ms(at["span_seconds"]), ms(at["floor_seconds"])),
        )
        for run in folder["stack"]["runs"]
        for at in run["lengths"]
    ]
    cuts = [
        (
            *(f"{at['rows']} x {count(at['bytes'])}", rate(at["bytes_per_second"]), spread(at["seconds"])),
            *(ms(at["span_seconds"]), ms(at["floor_seconds"])),
            f"{at['different_boundaries']} / {at['undecided']} / {count(at['boundaries'])}",
        )
        for run in folder["entropy"]["runs"]
        for at in run["shapes"]
    ]
    said = prose(
        "Entropies and patch boundaries by a 14-layer byte Transformer of width 768 and window 512. A boundary is "
        "undecided where rounding can decide it; all that differ from a loop in f64 are among those."
    )
    head = (
        "rows x bytes",
        "bytes/s",
        "ms (95 %)",
        "span, ms",
        "floor, ms",
        "boundaries that differ / undecided / all",
    )
    return (
        f"{table(('model', 'rows x tokens', 'ms (95 %)', 'span, ms', 'floor, ms'), stack)}\n\n"
        f"{said}\n\n{table(head, cuts)}"
    )


def prompts(folder: Folder) -> str:
    """Reading prompts, and bytes after them."""
    rows = [
        (
            *(count(at["bytes"]), spread(at["read_seconds"]), rate(at["bytes_read_per_second"])),
            *(ms(at["seconds_a_byte_written"]), gigabytes(at["peak_memory_bytes"])),
            f"{100 * at['difference_of_logits']:.1f} %",
        )
        for at in folder["generation"]["prompts"]
    ]
    said = prose(
        "The model of `books` with drawn parameters and static patches. The last column compares the logits behind the "
        "prompt with those after its last 64 bytes were fed one by one."
    )
    return f"{said}\n\n" + table(
        ("bytes", "reading, ms (95 %)", "read", "ms a byte after it", "memory", "difference"), rows
    )


def cpu(folder: Folder) -> str:
    """The demo's train step on a CPU."""
    rows = [
        (
            *(count(at["seq_len"]), str(at["batch_size"]), spread(at["step_seconds"])),
            *(rate(at["bytes_per_second"]), gigabytes(at["peak_resident_bytes"])),
        )
        for at in folder["cpu"]["rows"]
    ]
    said = prose(
        "The demo's train step on two cores, while other programs ran on the machine's other 14. The machine has the "
        "GPU that the file names; the step ran on its CPU."
    )
    return f"{said}\n\n" + table(
        ("bytes of a row", "rows", "step, ms (95 %)", "bytes/s", "resident memory"), rows
    )
