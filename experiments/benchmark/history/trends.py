"""Trends of kept records: python -m experiments.benchmark trends FOLDER/MACHINE/BENCHMARK."""

from pathlib import Path
from typing import Annotated

import tyro

from jaxblt.profiling.history import Trend, read_record, trends_of
from jaxblt.text_table import format_table


def trends(folder: Annotated[str, tyro.conf.Positional], window: int | None = None) -> None:
    """Print trend, drift and anomalies of each time in a folder of kept records.

    Args:
      folder: of one machine and benchmark, as `keep` prints it.
      window: runs of each of the last two windows; half of all runs if None.

    Raises:
      ValueError: fewer than six records, or windows that do not fit.
    """
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise ValueError(
            f"{folder} holds no records: name a folder of one machine and benchmark, as keep prints it"
        )
    found = trends_of([read_record(file) for file in files], window=window)
    headers = ["time", "runs", "a run, %", "p", "drift, %", "p", "says", "anomalies"]
    print(format_table(headers, [_row(name, trend, files) for name, trend in found.items()]))


def _row(name: str, trend: Trend, files: list[Path]) -> list[str | int | float]:
    says = [word for word, holds in (("trend", trend.has_trend), ("drift", trend.has_drift)) if holds]
    odd = [files[place].stem for place in trend.anomalies]
    slope, drift = 100 * trend.slope, 100 * trend.drift
    p = [f"{value:.1g}" for value in (trend.slope_p, trend.drift_p)]
    return [name, trend.runs, slope, p[0], drift, p[1], " ".join(says) or "-", " ".join(odd) or "-"]
