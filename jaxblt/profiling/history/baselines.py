"""Kept baselines: records in one folder a machine and benchmark, none of which is ever overwritten."""

import re
import time
from pathlib import Path

from jaxblt.outputs import write_text
from jaxblt.profiling.history.times import (
    Record,
    benchmark_of,
    commit_of,
    machine_of,
    moment_of,
    read_record,
)


def keep(path: str | Path, folder: str | Path) -> Path:
    """Copy a record to `folder/MACHINE/BENCHMARK/TIME-COMMIT.json` and return where it lies.

    Raises:
      FileExistsError: it is kept already.
      ValueError: the file is no record, or does not say what it measured and where.
    """
    record = read_record(path)
    moment = moment_of(record) or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(Path(path).stat().st_mtime))
    target = _place(record, folder) / f"{_plain(moment)}-{commit_of(record)}.json"
    if target.exists():
        raise FileExistsError(f"{path} is kept already, as {target}: nothing is overwritten, measure again")
    write_text(target, Path(path).read_text(encoding="utf-8"))
    return target


def kept(record: Record, folder: str | Path) -> list[Record]:
    """Return the kept records of this record's machine and benchmark, the oldest first.

    Raises:
      ValueError: there is none; the message names machines that have some.
    """
    place = _place(record, folder)
    files = sorted(place.glob("*.json"))
    if not files:
        others = sorted(path.parent.name for path in Path(folder).glob(f"*/{place.name}"))
        raise ValueError(
            f"{folder} keeps no {place.name} of {place.parent.name}, only of {others or 'no machine'}: times of "
            "different machines are not compared; keep a record of this machine first"
        )
    return [read_record(file) for file in files]


def check_same_machine(old: Record, new: Record) -> None:
    """Refuse to compare records of two machines or benchmarks.

    Raises:
      ValueError: names both.
    """
    for what, of in (("benchmark", benchmark_of), ("machine", machine_of)):
        if of(old) != of(new):
            raise ValueError(
                f"the old record's {what} is {of(old)}, the new one's {of(new)}: compare records of one"
            )


def _place(record: Record, folder: str | Path) -> Path:
    return Path(folder) / _plain(machine_of(record)) / _plain(benchmark_of(record))


def _plain(name: str) -> str:
    """Return a name that every file system takes."""
    return re.sub(r"[^\w.]+", "_", name).strip("_")
