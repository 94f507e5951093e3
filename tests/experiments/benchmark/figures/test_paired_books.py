"""Savings by memories over windows are paired by seed and book."""

import math
from typing import Any

import pytest

from experiments.benchmark.figures.paired_books import over_windows


def _runs(model: str, bits: list[list[float]]) -> list[dict[str, Any]]:
    """Return runs with one context, of which each seed has so many bits per byte of each book of 100 bytes."""
    return [
        {
            "model": model,
            "seed": seed,
            "contexts": [{"context": 8}],
            "books": {"num_bytes": [100] * len(each), "nats": [[100 * math.log(2) * of for of in each]]},
        }
        for seed, each in enumerate(bits)
    ]


def test_gains_are_of_the_same_seed_and_book() -> None:
    """Books differ by more bits than the memory saves, and no interval reaches 0."""
    windows, memory = _runs("window", [[1.0, 2.0, 4.0], [2.0, 3.0, 5.0]]), _runs("mag", [[0.9, 1.9, 3.6]] * 3)
    first, second, both = over_windows(memory, windows)
    assert [gain["seeds"] for gain in (first, second, both)] == [[0], [1], [0, 1]]
    bits = [gain["contexts"][0]["bits_per_byte"] for gain in (first, second, both)]
    assert [at["value"] for at in bits] == pytest.approx([0.2, 1.2, 0.7])
    assert [bits[0][end] for end in ("low", "high")] == pytest.approx([0.1, 0.4])
    share = first["contexts"][0]["share"]
    assert [share[end] for end in ("value", "low", "high")] == pytest.approx([0.6 / 7, 0.05, 0.1])
    assert over_windows(windows, windows) == []
    assert over_windows(memory, memory) == []
