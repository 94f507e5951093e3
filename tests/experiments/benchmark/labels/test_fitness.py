"""The benchmark of mutants: sequences from variants by hand, splits by position, ridge by its normal equations."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.labels.fitness import deal, fitness, read_variants


def write_scan(file: Path, count: int = 300) -> None:
    """Mutants of a sequence of 24 amino acids whose score is a sum over mutations."""
    rng, letters = np.random.default_rng(0), "ACDEFGHIKLMNPQRSTVWY"
    wild, effects = "MKTAYIAKQRQISFVKSHFSRQLE", rng.normal(size=(24, 20))
    lines = ["variant\tnum_mutations\tscore"]
    for _ in range(count):
        places = rng.choice(24, int(rng.integers(1, 4)), replace=False)
        new = [letters[int(rng.integers(20))] for _ in places]
        score = sum(effects[p, letters.index(a)] for p, a in zip(places, new, strict=True))
        variant = ",".join(f"{wild[p]}{p + 2}{a}" for p, a in zip(places, new, strict=True))
        lines.append(f"{variant}\t{len(places)}\t{score:.6f}")
    lines += ["K3*\t1\t0.5", "K3A\t1\tnan"]
    file.write_text("\n".join(lines) + "\n")


def test_variants_become_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("variant\tscore\nA2C\t1\nA2D,K4R\t-2\nA2*\t3\n")
    assert read_variants(tmp_path / "a.tsv") == [("CXK", 1.0, (0,)), ("DXR", -2.0, (0, 2))]
    (tmp_path / "b.tsv").write_text("variant\tscore\nA2C\t1\nG2D\t2\n")
    with pytest.raises(ValueError, match="variants say A and G of position 2"):
        read_variants(tmp_path / "b.tsv")


def test_no_position_lies_in_two_parts() -> None:
    rng = np.random.default_rng(0)
    places = [tuple(rng.choice(40, int(rng.integers(1, 3)), replace=False).tolist()) for _ in range(400)]
    parts = list(deal(places, "positions", np.random.default_rng(1)))
    held = {
        part: {p for found, own in zip(places, parts, strict=True) if own == part for p in found}
        for part in parts
    }
    assert not held["train"] & held["test"]
    assert not held["train"] & held["validation"]
    assert Counter(parts)["train"] > 150


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/labels/test_fitness")
def test_regressions_need_no_run(tmp_path: Path) -> None:
    write_scan(tmp_path / "scan.tsv")
    out = tmp_path / "figures.json"
    fitness(str(tmp_path / "scan.tsv"), str(out), work=str(tmp_path / "work"), seeds=1)
    found = json.loads(out.read_text())
    runs = {run["model"]: run for run in found["runs"]}
    assert (found["set"], found["variants"], list(runs)) == ("scan", 300, ["words", "start", "ridge"])
    assert runs["ridge"]["spearman"] > 0.6
    assert runs["start"]["spearman"] > 0.5
    rows = list(csv.DictReader((tmp_path / "work" / "records_0.csv").read_text().splitlines()))
    parts = {part: [r for r in rows if r["split"] == part] for part in ("train", "validation", "test")}
    letters = sorted({a for r in rows for a in r["sequence"]})

    def one_hot(part: str) -> np.ndarray:
        return np.array([[a == b for a in r["sequence"] for b in letters] for r in parts[part]], float)

    x, y = one_hot("train"), np.array([float(r["label"]) for r in parts["train"]])
    best = []
    for penalty in (0.1, 1.0, 10.0, 100.0):
        w = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ (y - y.mean()))
        errors = [
            (((one_hot(p) @ w + y.mean()) - [float(r["label"]) for r in parts[p]]) ** 2).mean() ** 0.5
            for p in ("validation", "test")
        ]
        best.append(errors)
    assert runs["ridge"]["rmse"] == pytest.approx(min(best)[1], rel=1e-3)
