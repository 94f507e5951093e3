"""The section of docs/results.md on convolutions token by token, from a file of the record."""

from experiments.benchmark._markdown import Figures, Folder, count, ms, prose, rounded, table


def streamed_filters(folder: Folder) -> str:
    """A token by form and rows, and a piece with prepared taps and without, by taps."""
    found = folder["streamed_filter"]
    said = prose(
        f"A causal convolution of {count(found['channels'])} channels token by token, fp32, on a CPU: processor time a "
        "token, all rows together, in the mean of a turn. Several rows stand at different tokens of their turns. A "
        "ring buffer multiplies all inputs by their taps. Doubling blocks are what `HyenaConfig` runs above 512 taps."
    )
    return f"{said}\n\n{_tokens(found['filters'])}\n\n{_pieces(found)}"


def _tokens(filters: list[Figures]) -> str:
    head = (
        "taps",
        "rows",
        "ring, ms",
        "doubling, ms",
        "ring / doubling",
        "FLOPs a channel: ring",
        "doubling",
    )
    rows = []
    for of in filters:
        flops = of["flops_a_token_and_channel"]
        for at in of["seconds_a_token"]:
            times = (ms(at["ring"]), ms(at["doubling"]), rounded(at["ring"] / at["doubling"]))
            cells = (count(flops["ring"]), count(flops["doubling"]))
            rows.append((count(of["taps"]), count(at["rows"]), *times, *cells))
    return table(head, rows)


def _pieces(found: Figures) -> str:
    said = prose(
        f"A call of a Hyena mixer with a state and {count(found['piece'])} tokens of one row, with taps that were made "
        "before (`prepare`) and with taps made in the call:"
    )
    rows = [
        (count(of["taps"]), *(ms(of["seconds_a_piece"][name]) for name in ("prepared", "unprepared")))
        for of in found["filters"]
    ]
    return f"{said}\n\n{table(('taps', 'prepared, ms', 'made in the call, ms'), rows)}"
