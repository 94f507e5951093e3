"""Variants that a run never saw: windows and offsets by hand, and figures of a run whose probabilities are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.labels.zero_shot import brca1, find_offset, windows, zero_shot
from tests.answers.runs import markov_run, random_probabilities

RNG = np.random.default_rng(0)
PLUS = "".join("ACGT"[i] for i in RNG.integers(0, 4, 400))
MINUS = PLUS.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def test_windows_hold_the_variant_also_at_the_ends():
    assert windows(b"ACGTACGT", 0, "T", 4) == (b"ACGT", b"TCGT")
    assert windows(b"ACGTACGT", 7, "A", 4) == (b"ACGT", b"ACGA")
    assert windows(b"ACGTACGT", 4, "G", 4) == (b"GTAC", b"GTGC")
    assert windows(b"ACG", 1, "T", 8) == (b"ACG", b"ATG")


def write_brca1(folder: Path) -> None:
    header = "chromosome\tposition (hg19)\treference\talt\tfunction.score.mean\tfunc.class"
    rows = []
    for i in range(100, 300):
        alt = "ACGT"[("ACGT".index(PLUS[i]) + 1 + i % 3) % 4]
        rows.append(f"17\t{5000 + i}\t{PLUS[i]}\t{alt}\t{-(i % 7) + 0.1}\t{'LOF' if i % 7 > 3 else 'FUNC'}")
    (folder / "snvs.tsv").write_text("\n".join([header, *rows]) + "\n")
    (folder / "c.fa").write_text(f">minus\n{MINUS}\n")


def test_the_offset_of_brca1_is_found(tmp_path):
    write_brca1(tmp_path)
    found = brca1(tmp_path, 40)
    assert len(found.rated) == 200
    assert found.text.decode() == PLUS
    assert found.rated[0].reference.decode() == PLUS[80:120]
    bases = np.frombuffer(PLUS.encode(), np.uint8)
    with pytest.raises(ValueError, match="0 offsets make all 200 reference bases agree"):
        find_offset(bases, np.arange(200), bases[200:0:-1])


def test_figures_are_written(tmp_path, monkeypatch):
    run = markov_run(random_probabilities(), kind="fasta", soft_mask="upper")
    monkeypatch.setattr("jaxblt.load", lambda run_dir: run)
    write_brca1(tmp_path)
    out = tmp_path / "z.json"
    zero_shot(str(tmp_path), "runs/genes", str(out), context=40, most=60)
    found = json.loads(out.read_text())
    assert (found["run"], found["variants"], list(found["models"])) == (
        "genes",
        60,
        ["run", "place", "markov"],
    )
    assert found["models"]["place"]["spearman"] is None  # no position has a second variant
    assert all(-1 <= found["models"][name]["spearman"] <= 1 for name in ("run", "markov"))
    assert all(0 <= f["auroc"] <= 1 for f in found["models"].values())
