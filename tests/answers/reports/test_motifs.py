"""Motifs from windows of high attribution: a planted one is found again, with its PWM."""

import numpy as np
import pytest

from jaxblt.answers.reports.motifs import Motif, find_motifs, similarity, write_meme

CORE = "TTGACATAAT"
PLANTED = np.where(np.array(list(CORE))[:, None] == np.array(list("ACGT")), 0.85, 0.05)


def records(*, both_strands=False, noise=0.3):
    """Random records with a motif drawn from `PLANTED`, and attributions of 1 at it beside noise."""
    rng, sequences, values = np.random.default_rng(0), [], []
    for i in range(120):
        digits, value = rng.integers(0, 4, 80), noise * np.abs(rng.normal(size=80))
        site, start = np.array([rng.choice(4, p=p) for p in PLANTED]), int(rng.integers(5, 65))
        digits[start : start + 10] = 3 - site[::-1] if both_strands and i % 2 else site
        value[start : start + 10] += 1
        sequences.append(bytes(b"ACGT"[d] for d in digits))
        values.append(value)
    return sequences, values


@pytest.mark.parametrize("both_strands", [False, True])
def test_a_planted_motif_is_found_with_its_pwm(both_strands):
    found = find_motifs(*records(both_strands=both_strands), count=1, both_strands=both_strands)
    (motif,) = found
    assert len(motif.sites) >= 100
    assert similarity(motif.pwm, PLANTED, both_strands=both_strands) > 0.97
    if not both_strands:
        assert motif.consensus == CORE
        np.testing.assert_allclose(motif.pwm, PLANTED, atol=0.12)
    assert {site.reverse for site in motif.sites} == ({False, True} if both_strands else {False})


def test_shuffled_records_hold_no_motif(tmp_path):
    sequences, values = records()
    (planted,) = find_motifs(sequences, values, count=1)
    rng = np.random.default_rng(1)
    shuffled = [bytes(rng.permutation(np.frombuffer(s, np.uint8))) for s in sequences]
    assert find_motifs(shuffled, values) == []
    write_meme(tmp_path / "m.meme", [planted])
    text = (tmp_path / "m.meme").read_text().splitlines()
    assert text[0] == "MEME version 4"
    assert f"MOTIF {CORE} motif-1" in text
    assert text[-1] == " ".join(f"{p:.6f}" for p in planted.pwm[-1])


def test_consensus_information_and_shifts_by_hand():
    pwm = np.array([[0.5, 0, 0.5, 0], [0, 1, 0, 0], [0.25] * 4])
    motif = Motif("ACGT", pwm, np.full(4, 0.25))
    assert motif.consensus == "RCN"
    np.testing.assert_allclose(motif.bits, [1, 2, 0], atol=1e-9)
    assert Motif("AK", np.array([[0.1, 0.9]]), np.full(2, 0.5)).consensus == "K"
    shifted = np.concatenate([np.full((2, 4), 0.25), PLANTED])
    assert similarity(PLANTED, shifted) == pytest.approx(1)
    assert similarity(PLANTED, PLANTED[::-1, ::-1], both_strands=True) == pytest.approx(1)


def test_bad_options_are_named():
    with pytest.raises(
        ValueError,
        match=r"no record has 20 letters of the alphabet in a row: lower width = 10 \(--motif-width\)",
    ):
        find_motifs([b"ACGTNACGT" * 4], [np.zeros(36)])
    with pytest.raises(ValueError, match="a record has 4 bytes and 3 values"):
        find_motifs([b"ACGT"], [np.zeros(3)])
