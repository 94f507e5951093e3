"""Loci kept back: experiments that overlap are of one, columns by hand, and a rule that holds everywhere is found."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from experiments.benchmark.labels.loci import REACH, cut, loci, mean_states, number_loci
from experiments.benchmark.labels.zero_shot import Rated
from tests.answers.runs import markov_run, random_probabilities

RNG = np.random.default_rng(0)


def test_stretches_that_overlap_are_one_locus() -> None:
    spans = {"d": ("2", 5, 9), "a": ("1", 0, 50), "c": ("1", 60, 70), "b": ("1", 40, 60), "e": ("1", 71, 80)}
    assert number_loci(spans) == {"a": 0, "b": 0, "c": 0, "e": 1, "d": 2}


def test_bases_around_a_variant_are_cut() -> None:
    one = Rated(b"ACGTA", b"CCGTA", 0.0, ("1", 0), "")
    assert cut(one, "reference") == "N" * REACH + "ACGTA" + "N" * (REACH - 4)
    assert cut(one, "alternate") == "N" * REACH + "CCGTA" + "N" * (REACH - 4)


def test_states_are_of_both_strands() -> None:
    def embed(records: list[bytes], **_: int) -> SimpleNamespace:
        return SimpleNamespace(arrays=[np.array([one.count(b"A"), one.find(b"C")], float) for one in records])

    found = mean_states(SimpleNamespace(embed=embed), ["NAACG", "TACN", "NAACG"])
    np.testing.assert_array_equal(found, [[1, 1], [1, 0.5], [1, 1]])  # AACG, CGTT and TAC, GTA
    assert mean_states(SimpleNamespace(embed=embed), ["AAAC"])[0].tolist() == [1.5, 1.0]  # and GTTT


def test_what_a_base_becomes_is_told_in_loci_kept_back(tmp_path: Path, monkeypatch) -> None:
    """G and C are good wherever they are: all models that see the change have nearly all of it."""
    rows = ["Element\tChrom\tPos\tRef\tAlt\tBarcodes\tCoefficient\tpValue"]
    for name, begin in (("a", 0), ("b", 20), ("c", 500), ("d", 900)):
        bases = "".join("ACGT"[i] for i in RNG.integers(0, 4, 40))
        for i, ref in enumerate(bases):
            for alt in "ACGT".replace(ref, ""):
                effect = (alt in "GC") - (ref in "GC") + 0.1 * RNG.normal()
                rows.append(f"{name}\t1\t{begin + i}\t{ref}\t{alt}\t99\t{effect:.4f}\t1")
    (tmp_path / "v.tsv").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr("jaxblt.load", lambda run_dir: markov_run(random_probabilities(), kind="fasta"))
    monkeypatch.setattr(
        "experiments.benchmark.labels.loci.mean_states",
        lambda run, bases: np.array([[one.count("G"), one.count("T")] for one in bases], float),
    )
    out = tmp_path / "f.json"
    loci(str(tmp_path / "v.tsv"), str(out), "genes", context=16, most=300, folds=3, seeds=2)
    found = json.loads(out.read_text())
    assert (found["loci"], found["experiments"], found["variants"]) == (3, 4, 300)
    assert found["by_locus"]["names"][0] == "a/b"
    figures = {run["model"]: run["spearman"] for run in found["runs"] if run["seed"] == 1}
    assert all(figures[name] > 0.8 for name in ("changes", "simple", "hybrid", "chosen"))
    assert abs(figures["place"]) < 0.4
    assert set(found["gain"]) == {"ratio", "states", "hybrid", "chosen"}
    assert all(gain["low"] <= gain["value"] <= gain["high"] for gain in found["gain"].values())
