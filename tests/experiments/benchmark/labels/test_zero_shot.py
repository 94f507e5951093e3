"""Variants that a run never saw: windows and offsets by hand, and figures of a run whose probabilities are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.labels.zero_shot import (
    brca1,
    find_offset,
    mpra,
    read_variants,
    scan,
    windows,
    zero_shot,
)
from tests.answers.runs import markov_run, random_probabilities

RNG = np.random.default_rng(0)
PLUS = "".join("ACGT"[i] for i in RNG.integers(0, 4, 400))
MINUS = PLUS.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def test_windows_hold_the_variant_also_at_the_ends():
    assert windows(b"ACGTACGT", 0, "T", 4) == (b"ACGT", b"TCGT")
    assert windows(b"ACGTACGT", 7, "A", 4) == (b"ACGT", b"ACGA")
    assert windows(b"ACGTACGT", 4, "G", 4) == (b"GTAC", b"GTGC")
    assert windows(b"ACG", 1, "T", 8) == (b"ACG", b"ATG")


def test_variants_become_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("variant\tscore\nA2C\t1\nA2D,K4R\t-2\nA2*\t3\n")
    assert read_variants(tmp_path / "a.tsv") == [("CXK", 1.0, (0,)), ("DXR", -2.0, (0, 2))]
    (tmp_path / "b.tsv").write_text("variant\tscore\nA2C\t1\nG2D\t2\n")
    with pytest.raises(ValueError, match="variants say A and G of position 2"):
        read_variants(tmp_path / "b.tsv")


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


def test_reporters_and_scans_become_windows(tmp_path):
    header = "Element\tChrom\tPos\tRef\tAlt\tBarcodes\tCoefficient\tpValue"
    rows = [f"e\t1\t{10 + p}\t{'ACGT'[p % 4]}\tT\t{9 + p}\t{p}\t1" for p in (0, 1, 2, 4)]
    (tmp_path / "v.tsv").write_text(
        "\n".join([header, *rows, "e\t1\t11\tC\t-\t99\t1\t1", "e\t1\tNA\tC\tA\t99\t1\t1"]) + "\n"
    )
    found = mpra(tmp_path / "v.tsv", 512)
    assert [(r.reference, r.alternate) for r in found.rated] == [
        (b"ACGNA", b"ATGNA"),
        (b"ACGNA", b"ACTNA"),
        (b"ACGNA", b"ACGNT"),
    ]
    (tmp_path / "s.tsv").write_text("variant\tscore\nA2C\t1\nA2D,K4R\t-2\nK4G\t0\n")
    assert [(r.reference, r.alternate) for r in scan(tmp_path / "s.tsv", 0).rated] == [
        (b"AXK", b"CXK"),
        (b"AXK", b"DXR"),
        (b"AXK", b"AXG"),
    ]


def test_figures_are_written(tmp_path, monkeypatch):
    run = markov_run(random_probabilities(), kind="fasta", soft_mask="upper")
    monkeypatch.setattr("jaxblt.load", lambda run_dir: run)
    write_brca1(tmp_path)
    out = tmp_path / "z.json"
    zero_shot("brca1", str(tmp_path), "runs/genes", str(out), context=40, most=60)
    found = json.loads(out.read_text())
    assert (found["run"], found["variants"], list(found["models"])) == (
        "genes",
        60,
        ["run", "place", "markov"],
    )
    assert found["models"]["place"]["spearman"] is None  # no position has a second variant
    assert all(-1 <= found["models"][name]["spearman"] <= 1 for name in ("run", "markov"))
    assert all(0 <= f["auroc"] <= 1 for f in found["models"].values())
