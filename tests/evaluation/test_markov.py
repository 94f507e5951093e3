"""The Markov model of DNA: counts by hand, both strands, ambiguous bases, sources of known entropy."""

import numpy as np
import pytest

from jaxblt.evaluation import fit_markov


def _reverse_complement(sequence: bytes) -> bytes:
    return sequence.translate(bytes.maketrans(b"ACGTacgt", b"TGCAtgca"))[::-1]


def test_table_counts_by_hand() -> None:
    model = fit_markov(b"ACGTAAC", order=1, both_strands=False)
    counts = np.array([[1, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]])  # AC CG GT TA AA AC
    smoothed = counts + 1.0
    np.testing.assert_allclose(model.table, np.log2(smoothed / smoothed.sum(1, keepdims=True)))
    assert model.order == 1
    expected = -model.table[[0, 1], [1, 2]]
    np.testing.assert_allclose(model.bits(b"ACG"), expected)


def test_both_strands_count_the_reverse_complement_too() -> None:
    sequence = bytes(
        np.random.default_rng(0).choice(list(b"ACGTN"), 500, p=[0.4, 0.3, 0.15, 0.1, 0.05]).tolist()
    )
    both = fit_markov(sequence, order=2)
    apart = fit_markov(sequence + b"N" + _reverse_complement(sequence), order=2, both_strands=False)
    np.testing.assert_array_equal(both.table, apart.table)
    np.testing.assert_array_equal(both.table, fit_markov(_reverse_complement(sequence), order=2).table)


def test_case_is_ignored_and_ambiguous_bases_are_neither_counted_nor_scored() -> None:
    plain = fit_markov(b"ACGTTGCA", order=2)
    np.testing.assert_array_equal(fit_markov(b"acgtTGCA", order=2).table, plain.table)
    assert plain.bits(b"ACNGTRACGT").size == 2  # only ACG and CGT are whole
    with pytest.raises(ValueError, match="no base has 2 unambiguous bases"):
        plain.bits_per_base(b"ACNGT")


def test_rows_sum_to_one() -> None:
    table = fit_markov(b"ACGGT" * 50, order=3, pseudocount=0.1).table
    np.testing.assert_allclose(np.exp2(table).sum(1), 1.0)


@pytest.mark.parametrize("order", [0, 4])
def test_uniform_bases_cost_two_bits(order: int) -> None:
    sequence = bytes(np.random.default_rng(1).choice(list(b"ACGT"), 300_000).tolist())
    assert fit_markov(sequence[:200_000], order=order).bits_per_base(sequence[200_000:]) == pytest.approx(
        2, abs=0.01
    )


def test_a_deterministic_walk_costs_nothing_at_its_order() -> None:
    walk = b"ACCGTTAG" * 5000  # each pair of bases has one successor
    assert fit_markov(walk, order=2, both_strands=False).bits_per_base(walk) < 0.01
    assert fit_markov(walk, order=0, both_strands=False).bits_per_base(walk) == pytest.approx(2.0, abs=0.01)


def test_bad_requests_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"0\.\.12, got 13"):
        fit_markov(b"ACGT", order=13)
    with pytest.raises(ValueError, match="must be positive"):
        fit_markov(b"ACGT", order=1, pseudocount=0.0)
