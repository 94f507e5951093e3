"""Planted boundaries, and cuts scored against them: the oracle, counts by hand, cuts at random."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.evaluation import planted, score_boundaries
from jaxblt.evaluation.planted import MOTIF
from jaxblt.patching import PatcherConfig, make_patches


def test_scores_by_hand() -> None:
    """First bytes and padding do not count; a boundary is met once, and not from another document."""
    segments = np.array([[1] * 8 + [2] * 6 + [0] * 2], np.int32)
    reference, cuts = np.zeros((2, 1, 16), bool)
    reference[0, [0, 3, 7, 10, 15]] = True
    cuts[0, [3, 6, 9, 9, 11]] = True
    cuts[0, 8] = True
    exact = score_boundaries(cuts, reference, segment_ids=segments)
    assert (exact.cuts, exact.boundaries) == (4, 3)
    assert (exact.precision, exact.recall, exact.f1) == (1 / 4, 1 / 3, 2 / 7)
    near = score_boundaries(cuts, reference, segment_ids=segments, tolerance=1)
    assert (near.precision, near.recall) == (3 / 4, 1)
    reference[0, 12] = True
    wide = score_boundaries(
        cuts & (np.arange(16) == 9), reference & (np.arange(16) != 10), segment_ids=segments, tolerance=3
    )
    assert wide.precision == 1
    with pytest.raises(ValueError, match="must be rows of the same shape"):
        score_boundaries(cuts[0], reference)


@pytest.mark.parametrize("kind", ["runs", "regions", "motifs"])
def test_planted_boundaries_stand_where_they_are_said_to(kind: str) -> None:
    texts = planted(kind, documents=8, length=300, seed=1)
    reference = np.stack(texts.boundaries)
    for text, marks in zip(texts.source.documents, texts.boundaries, strict=True):
        if kind == "motifs":
            ends = np.flatnonzero(marks)
            assert all(text[: t + 1].endswith(MOTIF) for t in ends)
        if kind == "runs":
            assert np.flatnonzero(marks).tolist() == [t for t in range(1, 300) if text[t] != text[t - 1]]
    found = score_boundaries(reference, reference)
    assert found.f1 == 1
    rate = reference.mean()
    assert found.random_f1 == pytest.approx(rate, abs=0.03)


@pytest.mark.slow(days=28, group="costly")
def test_entropy_finds_random_regions() -> None:
    """The set's own entropies: that of a random base is log 4, of a repeated one 0."""
    texts = planted("regions", documents=4, length=256, seed=2)
    reference = np.stack(texts.boundaries)
    entropies = np.where(reference, np.log(4), 0).astype(np.float32)
    ids = np.stack([np.frombuffer(text, np.uint8) for text in texts.source.documents]).astype(np.int32) + 4
    rule = PatcherConfig(threshold=0.7, block_size=64)
    patches = make_patches(rule, jnp.asarray(ids), entropies=jnp.asarray(entropies))
    found = score_boundaries(np.asarray(patches.closed).reshape(4, -1), reference)
    assert found.f1 >= 0.9 > found.random_f1 + 0.3


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="kind must be one of runs, regions, motifs, got 'words'"):
        planted("words", documents=1, length=8)
    with pytest.raises(ValueError, match="documents must be at least 1, got 0"):
        planted("runs", documents=0, length=8)
