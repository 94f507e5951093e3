"""The savings by memories over windows only on the same books, paired by seed and book."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np


def over_windows(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what memories save of the same bytes over only windows: by seed, and of all seeds together.

    Bits per byte and the share of those of windows, with 95 % intervals over books, of paired differences. Together,
    a book's nats are means over seeds: intervals do not count what seeds differ by.

    Args:
      runs: of memories; others among them are left out.
      others: runs of one setting, those of only windows among them.
    """
    windows = {run["seed"]: run for run in others if run["model"] == "window"}
    pairs = [
        (run, windows[run["seed"]]) for run in runs if run["model"] != "window" and run["seed"] in windows
    ]
    found = []
    for name in dict.fromkeys(run["model"] for run, _ in pairs):
        kind = [pair for pair in pairs if pair[0]["model"] == name]
        groups = [[pair] for pair in kind] + [kind] * (len(kind) > 1)
        found += [{"model": name, **_saved(group)} for group in groups]
    return found


def _saved(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Return what memories save over windows, of means over the pairs (memory, windows)."""
    from jaxblt.evaluation import document_bits_per_byte, ratio_interval

    memories, windows = zip(*pairs, strict=True)
    lengths, num_bytes = memories[0]["contexts"], np.asarray(memories[0]["books"]["num_bytes"])
    contexts = []
    for at, memory, alone in zip(lengths, _mean_nats(memories), _mean_nats(windows), strict=True):
        less = alone - memory
        low, high = ratio_interval(less, alone)
        share = {"value": float(less.sum() / alone.sum()), "low": low, "high": high}
        bits = asdict(document_bits_per_byte(less, num_bytes))
        contexts.append({"context": at["context"], "bits_per_byte": bits, "share": share})
    return {"seeds": [memory["seed"] for memory in memories], "contexts": contexts}


def _mean_nats(runs: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return nats over seeds, [contexts, books]."""
    return np.mean([run["books"]["nats"] for run in runs], axis=0)
