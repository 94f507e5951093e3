"""Sections of docs/results.md on blocks and Hyena layers by length."""

from experiments.benchmark._markdown import Figures, Folder, count, gigabytes, ms, percent, prose, table

PASSES = ("forward", "forward+backward")
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def _memory(planned: Figures | None) -> str:
    """Bytes of a program that gradients need: what is given, what is returned, and what is between."""
    return "" if planned is None else gigabytes(sum(planned.values()))


def _exponent(found: Figures | None) -> str:
    return "" if found is None else f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _passed(found: Figures | None, shortest: int) -> str:
    """The length from which a block is faster, with the ends of its interval; an end of None is no length.

    One that is faster at the shortest length already may be so below it.
    """
    if found is None:
        return ""
    if found["value"] == found["high"] == shortest:
        return f"at most {count(shortest)}"
    value, low, high = (
        "never" if found[end] is None else count(found[end]) for end in ("value", "low", "high")
    )
    return value if value == "never" and low == high == "never" else f"{value} ({low} to {high})"


def hyena_layers(folder: Folder) -> str:
    """A Hyena layer and its parts, by length and kind of filter."""
    names = ("layer", "mixer", "convolution", "taps", "mlp")
    text = []
    for name, found in folder.items():
        if found.get("benchmark") != "hyena_layer":
            continue
        rows = [
            (
                *(count(of["length"]), count(of["rows"]), of["filter"]),
                *(_both_passes(of["parts"].get(part)) for part in names),
            )
            for of in found["layers"]
        ]
        head = ("tokens", "rows", "filter", "layer", "mixer", "of it the convolution", "of it taps", "MLP")
        said = prose(
            f"`{name}`: a layer of width {count(found['dim'])} with its MLP on one {found['devices']['kind']}, bf16, "
            "one document a row, ms forward / with gradients (share of the layer). Each part is a program of its own. "
            "Files of different GPUs do not compare."
        )
        text.append(f"{said}\n\n{table(head, rows)}")
    return "\n\n".join(text)


def _both_passes(part: Figures | None) -> str:
    if part is None:
        return ""
    times = " / ".join(ms(part[p]["median"]) for p in PASSES)
    return f"{times} ({' / '.join(percent(part[p]['share']) for p in PASSES)})"


def blocks(folder: Folder) -> str:
    """A block of each mixer by length."""
    text = []
    for name, found in folder.items():
        if found.get("benchmark") != "scaling":
            continue
        rows = [
            (
                *(f"`{mixer}`", count(at["tokens"])),
                *(ms(at[p]["median"]) if at[p] else "does not fit" for p in PASSES),
                *(f"{1e6 / at[p]['tokens_per_second']:.2g}" if at[p] else "" for p in PASSES),
                *(percent(at[p]["mfu"]) if at[p] and at[p]["mfu"] is not None else "" for p in PASSES),
                *(_memory(at.get(kind)) for kind in ("planned_bytes", "planned_bytes_with_remat")),
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
            "MFU",
            "with gradients, MFU",
        )
        lengths = table((*head, "planned memory", "with remat"), rows)
        grown = [
            (
                *(f"`{mixer}`", count(found["parameters"][mixer])),
                *(_exponent(found["growth"][mixer][p]) for p in PASSES),
                *(_passed(found["crossover"].get(mixer, {}).get(p), timed[0]["tokens"]) for p in PASSES),
            )
            for mixer, timed in found["blocks"].items()
        ]
        head = ("mixer", "parameters", "exponent, forward", "exponent, with gradients")
        dtype = DTYPES[found.get("dtype", "bfloat16")]
        has_edges = any(mixer.endswith("_edges") for mixer in found["blocks"])
        edges = ", with `_edges` they move and see each other every 64 tokens" if has_edges else ""
        ends = ("faster than attention from, forward", "faster than attention from, with gradients")
        said = prose(
            f"`{name}`: a block with its MLP, one row, width {count(found['dim'])}, {dtype}. `T32` to `T256` are state "
            f"engines of so many slots{edges}. Exponents of time in length are fitted from 16,384 tokens on, with "
            "their 95 % interval."
        )
        text.append(f"{said}\n\n{lengths}\n\n{table((*head, *ends), grown)}")
    return "\n\n".join(text)
