"""A gate: python -m experiments.benchmark compare OLD NEW; exit status 1 if a time is slower."""

from pathlib import Path
from typing import Annotated

import tyro

from jaxblt.profiling.history import Change, find_changes, kept, read_record
from jaxblt.profiling.history.changes import ALPHA
from jaxblt.text_table import format_table


def compare(
    old: Annotated[str, tyro.conf.Positional], new: Annotated[str, tyro.conf.Positional], alpha: float = ALPHA
) -> None:
    """Print which times of a record changed, and end with status 1 if one is slower.

    Args:
      old: earlier record, or a folder of kept ones.
      new: record to judge.
      alpha: probability that a record without a change fails.

    Raises:
      ValueError: the records are of different machines or benchmarks, or share no time; or the folder keeps this record
        alone.
      SystemExit: with status 1, a time is slower.
    """
    record = read_record(new)
    # Leave the record itself out: beside itself no time would be slower
    others = [one for one in kept(record, old) if one != record] if Path(old).is_dir() else [read_record(old)]
    if not others:
        raise ValueError(f"{old} keeps {new} alone: keep an earlier record of this machine first")
    changes = find_changes(others, record, alpha=alpha)
    headers = ["time", "old ms", "new ms", "new / old", "threshold", "p", "verdict"]
    print(format_table(headers, [_row(change) for change in changes.found]))
    for which, names in (("old", changes.only_old), ("new", changes.only_new)):
        if names:
            print(f"only in the {which} record: {', '.join(names)}")
    if changes.slower:
        print(f"{len(changes.slower)} of {len(changes.found)} times are slower")
        raise SystemExit(1)


def _row(change: Change) -> list[str | float]:
    numbers = [1e3 * change.old, 1e3 * change.new, change.ratio, change.threshold]
    return [change.name, *numbers, f"{change.p:.1g}", change.verdict]
