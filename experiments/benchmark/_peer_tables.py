"""Sections of docs/results.md on what others' code takes for the same work, from files of the record."""

from experiments.benchmark._markdown import Figures, Folder, ms, percent, prose, rounded, table


def peers(folder: Folder) -> str:
    """PyTorch's FFT, LoRA as PEFT writes it, flash-linear-attention, and titans-pytorch."""
    said = prose(
        "Not in alternating rounds with ours, which are under Operations. `chain` is a LoRA layer as PEFT writes it, "
        "under a CUDA graph; `products` are the base's products alone, `joined` the same as one product."
    )
    tables = (_ffts(folder), _lora(folder), _slots(folder["fla_slots"]), _memories(folder["titans_pytorch"]))
    return "\n\n".join((said, *tables))


def _ffts(folder: Folder) -> str:
    rows = [
        (shape, name.replace("+", " + "), "out of memory" if isinstance(taken, str) else rounded(taken))
        for found in (folder[f"torch_fft_conv{at}"] for at in ("_short", "", "_1m"))
        for shape, call in found["calls"].items()
        for name, taken in call["torch_ms"].items()
    ]
    return table(("long convolution", "pass", "`torch.fft`, ms"), rows)


def _lora(folder: Folder) -> str:
    names = ("chain", "products", "joined")
    rows = [
        (
            *(shape, name.replace("+", " + ")),
            *(rounded(call["ms"][way][name]) for way in names),
            percent(over),
        )
        for shape, call in folder["torch_lora"]["calls"].items()
        for name, over in call["overhead"].items()
    ]
    head = ("LoRA", "pass", *(f"{way}, ms" for way in names), "chain over the fastest base")
    return table(head, rows)


def _slots(found: Figures) -> str:
    row = (f"{found['shape']} and its read", rounded(found["fla_ms"]), ms(found["ours"]["median"]))
    return table(("gated slot attention, forward", "flash-linear-attention, ms", "ours, ms"), [row])


def _memories(found: Figures) -> str:
    rows = [
        (shape, name.replace("+", " + "), rounded(taken))
        for shape, call in found["calls"].items()
        for name, taken in call.items()
    ]
    return table(("neural memory", "pass", "titans-pytorch, ms"), rows)
