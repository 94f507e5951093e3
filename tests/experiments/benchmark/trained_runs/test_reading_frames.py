"""Counts of codons beside the run `genes`: tables by hand, draws that follow them, frames that stay open."""

import numpy as np

from experiments.benchmark.trained_runs.reading_frames import bits_of, draw, fit_counts, share_open


def test_each_place_of_a_codon_is_counted_by_itself() -> None:
    genes = b"ACG" * 1000
    assert bits_of(fit_counts(genes, 0, 3), genes) < 0.02
    one = fit_counts(genes, 0, 1)
    np.testing.assert_allclose(np.exp2(one[0, 0, :3]), 1 / 3, atol=1e-3)
    np.testing.assert_allclose(np.exp2(fit_counts(b"ACGTTT" * 50, 2, 3)).sum(-1), 1, rtol=1e-12)


def test_draws_follow_the_table() -> None:
    table = fit_counts(b"ACG" * 100_000, 1, 3)
    assert draw(table, [b"A", b"A"], 29, seed=0) == [b"CG" + b"ACG" * 9] * 2


def test_a_frame_is_open_without_a_stop_in_the_frame_of_its_gene() -> None:
    assert share_open([b"ATG", b"ATGA", b"ATG"], [b"ATAAAA", b"TAA", b"TAG"]) == 2 / 3
