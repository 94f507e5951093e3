"""The times in a benchmark's record, by name, and the machine that took them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxblt.profiling.history.welch import Estimate
from jaxblt.profiling.provenance import ORIGIN

Record = dict[str, Any]
"""A benchmark's JSON."""
_FIELDS = frozenset({"median", "low", "high", "trials"})
"""What a time consists of, wherever it stands in a record."""
_NO_LABELS = frozenset({*ORIGIN, "method", "trials", "outliers", "commit", "git_commit"})


class Timing(NamedTuple):
    """A median with its 95 % interval in seconds, from `trials` samples."""

    median: float
    low: float
    high: float
    trials: int
    method: str | None = None

    @property
    def estimate(self) -> Estimate:
        """The median with the standard error that its interval implies."""
        from scipy import special  # here, as runs compare nothing

        reach = float(special.ndtri(0.975))
        return Estimate(self.median, (self.high - self.low) / (2 * reach), self.trials)


def read_record(path: str | Path) -> Record:
    """Read a record.

    Raises:
      ValueError: the file is no JSON object, or has no time.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}): name a file that a benchmark wrote") from error
    if not isinstance(record, dict) or not times_of(record):
        raise ValueError(
            f"{path} has no times (median, low, high, trials): name a record of a timed benchmark"
        )
    return record


def times_of(record: Mapping[str, Any]) -> dict[str, Timing]:
    """Return every time of a record by its path.

    Entries of lists are named by their words and whole numbers, such as `tokens=4096`, so that a list that grew still
    matches. Sizes in bytes are left out of names: they are figures.
    """
    found: dict[str, Timing] = {}
    for name, timing in _walk(record, ()):
        again = sum(known.partition("#")[0] == name for known in found)
        found[f"{name}#{again + 1}" if again else name] = timing
    return found


def machine_of(record: Mapping[str, Any]) -> str:
    """Return the kind and number of devices that a record was measured on; for a CPU its model and cores.

    Raises:
      ValueError: the record names no device.
    """
    found = next(_origins(record), None)
    if found is None:
        raise ValueError("a record names its device (`devices` or `machine`): this one does not")
    machine, devices = found.get("machine", {}), found.get("devices", {})
    if devices.get("platform") == "cpu":
        return f"{found.get('cpus_usable') or found.get('cpus')} x {found['cpu']}"
    kind, count = devices.get("kind") or machine["device"], devices.get("count") or machine["device_count"]
    return f"{count} x {kind}"


def platform_of(record: Mapping[str, Any]) -> str:
    """Return "cpu" or "gpu"."""
    found = next(_origins(record), {})
    named = found.get("devices", {}).get("platform"), found.get("machine", {}).get("device")
    return "cpu" if "cpu" in named else "gpu"


def benchmark_of(record: Mapping[str, Any]) -> str:
    """Return the name of the benchmark, or of the operation, that a record is of.

    Raises:
      ValueError: it names neither.
    """
    name = record.get("benchmark") or record.get("op")
    if not name:
        raise ValueError("a record names its `benchmark` or `op`: this one does not, measure again")
    return str(name)


def moment_of(record: Mapping[str, Any]) -> str | None:
    """Return when a record was measured (UTC); None if it does not tell."""
    return next((found["time"] for found in _origins(record) if "time" in found), None)


def commit_of(record: Mapping[str, Any]) -> str:
    """Return the first 12 digits of the commit that a record measured."""
    for found in _origins(record):
        if commit := found.get("git", {}).get("commit") or found.get("machine", {}).get("commit"):
            return str(commit)[:12]
    return "unknown"


def _origins(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the record and its runs as far as they say where they come from."""
    for part in (record, *record.get("runs", ())):
        if isinstance(part, Mapping) and ("devices" in part or "machine" in part):
            yield part


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Timing]]:
    if isinstance(node, Mapping):
        if node.keys() >= _FIELDS:
            figures = (float(node["median"]), float(node["low"]), float(node["high"]), int(node["trials"]))
            yield "/".join(path), Timing(*figures, node.get("method"))
        for name, held in node.items():
            yield from _walk(held, (*path, name))
    elif isinstance(node, list):
        for place, held in enumerate(node):
            yield from _walk(held, (*path, _label(held, place)))


def _label(entry: Any, place: int) -> str:
    """Return the words and whole numbers that name an entry of a list, or its place."""
    if not isinstance(entry, Mapping):
        return str(place)
    words = [
        f"{name}={value}"
        for name, value in entry.items()
        if isinstance(value, str | int) and not isinstance(value, bool)
        if name not in _NO_LABELS and not name.endswith("bytes")
    ]
    return ",".join(words[:4]) or str(place)
