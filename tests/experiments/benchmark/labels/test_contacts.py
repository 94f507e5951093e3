"""The benchmark of contacts: pairs and words by hand, a ridge that finds a planted place, a chromosome's model."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.labels.contact_map import (
    Chromosome,
    deal,
    expected,
    middles_of_centromeres,
    read_chromosomes,
    word_shares,
)
from experiments.benchmark.labels.contact_model import flipped
from experiments.benchmark.labels.contact_settings import Settings
from experiments.benchmark.labels.contacts import contacts, fit_ridge, near_place, score, standardise

BIN, RNG = 20, np.random.default_rng(0)
TINY = Settings(
    bin_size=BIN, window=10, nearest=1, farthest=3, word=2, held=1, dim=4, layers=1, reach=8, steps=2, looks=2
)


def write_map(folder: Path) -> tuple[str, str, str]:
    """Write a map of three chromosomes of six bins whose contacts fall with distance and at the middle; others lack."""
    places = [(c, i) for c in range(4) for i in range(6)]
    pairs = [(a, b) for a in range(24) for b in range(a, 24)]
    counts = [
        100 // (1 + b - a) // (1 + (places[a][1] < 3 <= places[b][1])) if places[a][0] == places[b][0] else 7
        for a, b in pairs
    ]
    weight = np.full(24, 0.5)
    weight[19] = np.nan
    np.savez(
        folder / "map.npz",
        chrom_names=np.array([b"none", b"a", b"b", b"c"]),
        bin_chrom=np.array([c for c, _ in places], np.uint8),
        bin_weight=weight,
        bin1=np.array([a for a, _ in pairs], np.uint16),
        bin2=np.array([b for _, b in pairs], np.uint16),
        count=np.array(counts, np.int32),
    )
    bases = ["".join("ACGT"[i] for i in RNG.integers(0, 4, 6 * BIN - 3)) for _ in range(3)]
    (folder / "g.fa").write_text("".join(f">{n}\n{s.lower()}\n" for n, s in zip("abc", bases, strict=True)))
    rows = [["S", "centromere", *[""] * 6, str(c), "50", "70", "W"] for c in (1, 2, 3)]
    (folder / "f.tab").write_text(
        "\n".join("\t".join(row) for row in [["S", "ORF", *[""] * 10], *rows]) + "\n"
    )
    return str(folder / "map.npz"), str(folder / "g.fa"), str(folder / "f.tab")


def test_pairs_are_those_of_one_chromosome_at_the_asked_distances(tmp_path: Path) -> None:
    file, genome, features = write_map(tmp_path)
    found = read_chromosomes(Path(file), Path(genome), 1, 3, bin_size=BIN)
    assert [one.name for one in found] == ["a", "b", "c"]
    logs = found[0].logs
    assert logs.shape == (6, 4)
    assert np.isnan(logs[:, 0]).all()
    assert logs[0, 2] == pytest.approx(np.log(33 / 4))
    assert logs[1, 3] == pytest.approx(np.log(25 // 2 / 4))
    assert np.isnan(logs[4, 2:]).all()
    assert np.isnan(found[2].logs[1]).all()
    usual = expected(found[:1])
    assert usual[1] == pytest.approx(np.nanmean(logs[:, 1]))
    assert np.isnan(usual[0])
    assert middles_of_centromeres(Path(features), "abc").tolist() == [60, 60, 60]
    with pytest.raises(ValueError, match=r"no centromere of \['d'\]: leave --features out"):
        middles_of_centromeres(Path(features), "abcd")
    with pytest.raises(ValueError, match=r"a has 6 bins in .*map\.npz and fills 12 of 10 bases in .*g\.fa"):
        read_chromosomes(Path(file), Path(genome), 1, 3, bin_size=BIN // 2)


def test_windows_are_standardised_by_training_alone() -> None:
    found = [Chromosome(name, b"", np.zeros((2, 4))) for name in "ab"]
    table = [np.array([[0.0], [2], [4]]), np.full((4, 1), 100.0)]
    train, test = standardise(table, [0], found, 2)
    assert train[:, 0] == pytest.approx([-(1.5**0.5), 0, 1.5**0.5, 0])
    assert test[:, 0] == pytest.approx(98 / (8 / 3) ** 0.5)


def test_words_are_counted_on_both_strands() -> None:
    shares = word_shares(b"AACNAA", 3, 2)
    words = {f"{a}{b}": 4 * i + j for i, a in enumerate("ACGT") for j, b in enumerate("ACGT")}
    assert shares.shape == (2, 16)
    assert {w: shares[0, n] for w, n in words.items() if shares[0, n]} == pytest.approx(
        {"AA": 1 / 3, "AC": 1 / 3, "TT": 1 / 3, "GT": 1 / 3}
    )
    assert shares[1, words["AA"]] == pytest.approx(1 / 3)


def test_a_part_has_whole_chromosomes_and_ends_change_places() -> None:
    parts = deal(16, 3, 3)
    assert sorted(c for part in parts.values() for c in part) == list(range(16))
    assert (len(parts["test"]), len(parts["validation"])) == (3, 3)
    target = np.full((5, 3), np.nan)
    for i, d in ((0, 1), (3, 1), (1, 2)):
        target[i, d] = 10 * i + d
    windows, turned = flipped(np.arange(5)[:, None], target)
    assert windows[0, 0] == 4
    assert (turned[3, 1], turned[0, 1], turned[1, 2]) == (1, 31, 12)


def test_a_ridge_finds_what_a_place_does() -> None:
    """Labels fall where the place lies between two bins; chromosomes of other places are predicted."""
    places, targets = RNG.integers(8, 32, 9) + 0.5, []
    for place in places:
        i, d = np.indices((40, 12))
        between = (i < place) & (i + d > place)
        targets.append(np.where((i + d < 40) & (d >= 5), np.where(between, -1.0, 0.3), np.nan))
    columns = lambda c, i, j: near_place(i - places[c], j - places[c])  # noqa: E731
    parts = deal(9, 0, 2)
    tested = [targets[c] for c in parts["test"]]
    found = score(fit_ridge(columns, targets, parts), tested, np.zeros(12))
    assert found["auroc"] == 1
    assert found["accuracy"] > found["majority"]
    nothing = score([np.zeros_like(target) for target in tested], tested, -np.arange(12.0))
    assert (nothing["spearman"], nothing["auroc"]) == (0, 0.5)
    assert nothing["spearman_of_logs"] > 0.9


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/labels/test_contacts")
def test_it_leaves_its_figures(tmp_path: Path) -> None:
    file, genome, features = write_map(tmp_path)
    out = tmp_path / "figures.json"
    found = contacts(file, genome, str(out), features, seeds=1, settings=TINY)
    assert json.loads(out.read_text())["runs"] == json.loads(json.dumps(found["runs"]))
    named = {run["model"]: run for run in found["runs"]}
    assert list(named) == ["distance", "ends", "words", "centromeres", "chromosome_words"]
    assert len(named["chromosome_words"]["validation_errors"]) == 3
    assert all(np.isfinite(run["spearman"]) for run in named.values())
    with pytest.raises(ValueError, match="3 chromosomes leave none for training: lower"):
        contacts(file, genome, str(out), settings=Settings(**{**vars(TINY), "held": 2}))
