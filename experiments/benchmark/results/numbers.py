"""Numbers as they stand in tables: three digits and a unit."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any


def rounded(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, thousands separated."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    return f"{float(text):,.0f}" if abs(value) >= 1 else text


def ms(seconds: float) -> str:
    """Return seconds as milliseconds."""
    return rounded(1e3 * seconds)


def spread(taken: Mapping[str, Any]) -> str:
    """Return the median in ms with its 95 % interval, or with the extremes if a file has those."""
    if "out_of_memory" in taken:
        return "out of memory"
    taken = taken.get("seconds", taken)
    ends = (taken["low"], taken["high"]) if "low" in taken else (taken["least"], taken["most"])
    return f"{ms(taken['median'])} ({ms(ends[0])} to {ms(ends[1])})"


def rate(bytes_per_second: float) -> str:
    """Return bytes a second in KB/s or MB/s (10^3, 10^6)."""
    if bytes_per_second >= 1e6:
        return f"{bytes_per_second / 1e6:.2f} MB/s"
    return f"{bytes_per_second / 1e3:.0f} KB/s"


def interval(value: Mapping[str, float]) -> str:
    """Return a value with its interval."""
    return f"{value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def share(found: Mapping[str, float]) -> str:
    """Return an accuracy with its interval, or with the worst and the best of several runs."""
    ends = ("worst", "best") if "worst" in found else ("low", "high")
    return "{:.0%} ({:.0%} to {:.0%})".format(*(found[name] for name in ("accuracy", *ends))).replace(
        "%", " %"
    )


FORMATS: dict[str, Callable[[Any], str]] = {
    "": str,
    "3": rounded,
    "%": lambda value: f"{100 * value:.0f} %",
    "%1": lambda value: f"{100 * value:.1f} %",
    "%2": lambda value: f"{100 * value:.2f} %",
    "GB": lambda size: f"{size / 1e9:.1f} GB",
    "MB": lambda size: f"{size / 1e6:,.1f} MB",
    "MB seen": lambda size: f"{size / 1e6:,.0f} MB",
    "s": lambda seconds: f"{seconds:.0f} s",
    "code": "`{}`".format,
    "name": "`{}`".format,
    "ms": ms,
    "spread": spread,
    "rate": rate,
    "interval": interval,
    "share": share,
}
"""Ways to write a value; any other is Python's, such as ",.3f". A name needs an entry in its section's legend."""


def write(value: Any, form: str = "") -> str:
    """Return a value as a cell: nothing for None, a text as it is, " / " between the values of a list."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " / ".join(write(each, form) for each in value) if any(v is not None for v in value) else ""
    if isinstance(value, str) and form not in ("code", "name"):
        return value.partition(": CUDA")[0]
    return FORMATS[form](value) if form in FORMATS else format(value, form)


def write_mean(values: list[float], form: str) -> str:
    """Return the mean of several runs as a cell, with the least and the most of them."""
    mean = write(fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({write(min(values), form)} to {write(max(values), form)})"
