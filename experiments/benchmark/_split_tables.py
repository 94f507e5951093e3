"""Sections of docs/results.md that several GPUs of one host measured, each from files of the record."""

from collections.abc import Iterator

from experiments.benchmark._markdown import (
    Figures,
    Folder,
    count,
    flags,
    gigabytes,
    ms,
    percent,
    prose,
    rate,
    rounded,
    spread,
    table,
)

OPS = {
    "head": "`gated_linear_attention`",
    "key": "`gated_linear_attention`, gates per key channel",
    "delta": "`gated_delta_rule`",
}
MODES = {"ring": "ring, zig-zag order", "ring_swapped": "ring, tokens in order", "all_to_all": "all-to-all"}


def _named(folder: Folder, name: str) -> list[tuple[str, Figures]]:
    """The files of one benchmark: `name.json` and those whose names go on after an underscore."""
    return [(file, found) for file, found in folder.items() if file == name or file.startswith(f"{name}_")]


def rings(folder: Folder) -> str:
    """Attention over GPUs, by file."""
    head = (
        "file",
        "GPUs",
        "tokens",
        "pass",
        "one GPU, ms",
        *MODES.values(),
        "zig-zag ring against rows apart",
    )
    rows = [
        (f"`{name}`", str(found["devices_in_ring"]), *row)
        for name, found in _named(folder, "ring")
        for row in _ring_rows(found)
    ]
    errors = ("file", "ring of", "o", "dq", "dk", "dv", "output / gradients repeat bit for bit")
    said = prose(
        "Causal, 32 query and 8 key heads of 128, bf16: ms with their spread, and efficiency. Efficiency is "
        "T1 / (n Tn), with T1 one GPU's cuDNN kernel at the same total length. *Rows apart*: every GPU attends to a "
        "row of its own, as much work, and exchanges nothing. Above 100 %, the long single call ran at a lower rate "
        "than the shorter calls of the ring. `_cudnn` and `_mosaic_gpu` ran those kernels by name; `_peer` exchanged "
        "by memory copy. The spread is the extremes of 10 trials, taken variant after variant; in files with `low` and "
        "`high` it is the 95 % interval of the median, and variants alternated."
    )
    return (
        f"{said}\n\n{table(head, rows)}\n\n"
        "Errors against f64 at 4,096 tokens, relative to the one-GPU kernel's:\n\n"
        f"{table(errors, _ring_errors(folder))}"
    )


def _ring_rows(found: Figures) -> Iterator[tuple[str, ...]]:
    for at in found["scaling"]:
        for name in ("forward", "forward_backward"):
            taken = at[name]
            alone, apart = taken["one_device"], taken["ring"].get("efficiency_against_independent")
            yield (
                *(count(at["length"]), name.replace("_", " + ")),
                ms(alone["median"]) if "median" in alone else "",
                *(_mode(taken.get(mode, {})) for mode in MODES),
                "" if apart is None else percent(apart),
            )


def _mode(taken: Figures) -> str:
    if "median" not in taken:
        return "failed" if "failed" in taken else ""
    return spread(taken) + (f", {percent(taken['efficiency'])}" if "efficiency" in taken else "")


def _ring_errors(folder: Folder) -> Iterator[tuple[str, ...]]:
    for name, found in _named(folder, "ring"):
        errors, same = found["errors_against_f64"], found["against_one_device"]
        repeats = " / ".join(
            "yes" if same[f"{part}_repeat{'s' if part == 'output' else ''}_bit_for_bit"] else "no"
            for part in ("output", "gradients")
        )
        for ring, of_ring in errors.items():
            if ring != "1" and "swapped" not in ring:
                ratios = (f"{of_ring[x] / errors['1'][x]:.3f}" for x in ("o", "dq", "dk", "dv"))
                yield (f"`{name}`", ring, *ratios, repeats)


def packed(folder: Folder) -> str:
    """Packed rows in a ring."""
    found = folder["packed_ring"]
    _, length, heads, _, width = found["shape"]
    rows = [
        (str(row["documents"]), name, *(spread(row[name][x]) for x in ("forward", "forward_backward")))
        for row in found["rows"]
        for name in ("cudnn", "xla")
    ]
    worst = max(
        row["cudnn"]["errors"][x] / row["xla"]["errors"][x]
        for row in found["rows"]
        for x in row["xla"]["errors"]
    )
    said = prose(
        f"One row of {count(length)} tokens over {found['devices_in_ring']} GPUs, {heads} heads of {width}, bf16, "
        f"causal. cuDNN's errors are at most {worst:.2f} times XLA's."
    )
    return f"{said}\n\n" + table(
        ("documents", "implementation", "forward, ms", "forward + backward, ms"), rows
    )


def exchanges(folder: Folder) -> str:
    """Messages to the next GPU of a ring."""
    rows = [
        (
            f"`{name}`",
            str(found["devices_in_ring"]),
            _setting(found, sent),
            rounded(sent["mib"]),
            *_sent(sent),
        )
        for name, found in (*_named(folder, "exchange"), *_named(folder, "ring"))
        for sent in (*found.get("exchanges", ()), *found.get("exchange", ()))
    ]
    said = prose(
        "Each GPU sends to the next, and as much comes in at once. `copies` is `--xla_gpu_use_memcpy_local_p2p`, "
        "`peer` is `--xla_gpu_collective_permute_mode=peer`."
    )
    return f"{said}\n\n" + table(("file", "GPUs", "setting", "MiB", "ms", "GiB/s"), rows)


def _setting(found: Figures, sent: Figures) -> str:
    return sent.get("setting", "default") + (f", `{flags(found)}`" if flags(found) else "")


def _sent(sent: Figures) -> tuple[str, str]:
    if "failed" in sent:
        return "failed", ""
    taken = sent["seconds"]
    return (spread(taken) if isinstance(taken, dict) else ms(taken)), rounded(sent["gib_per_second"])


def layers(folder: Folder) -> str:
    """A layer with its MLP, forward and backward."""
    rows = [
        (
            *(f"`{name}`", at["filter"], count(at["dim"]), count(at["tokens"]), str(at["devices"])),
            *(_time(at["all"]), _time(at["one"]), "" if at["speed_up"] is None else f"{at['speed_up']:.2f}"),
        )
        for name, found in _named(folder, "sequence_parallel")
        for at in found.get("layers", ())
    ]
    head = ("file", "filter or mixer", "D", "tokens", "GPUs", "ms (95 %)", "one GPU, ms (95 %)", "speed-up")
    return table(head, rows)


def ops(folder: Folder) -> str:
    """A bare op of linear states, forward and backward."""
    rows = [
        (
            *(f"`{name}`", OPS[at["op"]], count(at["tokens"]), str(at["heads"]), str(at["devices"])),
            *(_time(at["all"]), _time(at["one"])),
            "" if at["share_of_ideal"] is None else percent(at["share_of_ideal"]),
        )
        for name, found in _named(folder, "sequence_parallel")
        for at in found.get("ops", ())
    ]
    if not rows:
        return ""
    head = ("file", "op", "tokens", "heads", "GPUs", "ms (95 %)", "one GPU, ms (95 %)", "share of the ideal")
    said = prose(
        "Forward and backward of one document, heads of 128, bf16. The ideal is 1 / n of one GPU's time."
    )
    return f"{said}\n\n{table(head, rows)}"


def steps(folder: Folder) -> str:
    """A train step on one sequence, and its loss without gradients."""
    said = prose(
        "The model of `books` with static patches of four bytes and scanned blocks with full remat. Bytes/s are of all "
        "GPUs together. Memory is the allocator's peak of one GPU."
    )
    head = (
        "file",
        "pass",
        "bytes",
        "GPUs",
        "ms (95 %)",
        "bytes/s",
        "planned",
        "memory",
        "first loss",
        "against one GPU",
    )
    rows = [
        (f"`{name}`", what, *_step(at))
        for name, found in _named(folder, "sequence_parallel")
        for what, key in (("train step", "steps"), ("forward", "forward"))
        for at in found.get(key, ())
    ]
    rows.sort(key=lambda row: (row[1] != "train step", int(row[2].replace(",", "")), int(row[3]), row[0]))
    alone = [
        (f"`{name}`", count(at["check"]["bytes"]), spread(at["one_on_its_share"]["seconds"]))
        for name, found in _named(folder, "sequence_parallel")
        for at in found.get("steps", ())
        if "check" in at
    ]
    return (
        f"{said}\n\n{table(head, rows)}\n\nOne GPU on its share of those bytes:\n\n"
        f"{table(('file', 'bytes', 'train step, ms (95 %)'), alone)}\n\n"
        "![Bytes a second and planned memory of a GPU against the context]"
        "(../experiments/results/sequence_parallel.png)"
    )


def _time(taken: Figures) -> str:
    return spread(taken["seconds"]) if "seconds" in taken else "out of memory"


def _step(at: Figures) -> tuple[str, ...]:
    taken = at["all"]
    if "seconds" not in taken:
        return (count(at["bytes"]), str(at["devices"]), _time(taken), *[""] * 5)
    check, loss = at.get("check"), taken.get("first_loss", taken.get("loss"))
    same = "" if check is None else f"{rounded(check['relative'], 2)} at {count(check['bytes'])} bytes"
    return (
        *(count(at["bytes"]), str(at["devices"]), spread(taken["seconds"]), rate(at["bytes_per_second"])),
        *(gigabytes(taken["planned_bytes"]), gigabytes(taken["peak_memory_bytes"]), f"{loss:.6f}", same),
    )


def plans(folder: Folder) -> str:
    """Memory of such a step, compiled for GPUs that are not there."""
    rows = [
        (f"`{name}`", count(at["bytes"]), str(at["devices"]), gigabytes(at["planned_bytes"]))
        for name, found in _named(folder, "sequence_plan")
        for at in found.get("plans", ())
    ]
    return table(("file", "bytes", "GPUs", "planned for each"), rows)
