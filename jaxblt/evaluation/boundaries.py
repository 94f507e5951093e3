"""Agreement of cuts with a reference: precision, recall and F1, beside random cuts at the same rate."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from jaxblt.validation import whole


@dataclass(frozen=True)
class BoundaryScores:
    """Agreement of cuts with a reference.

    Attributes:
      precision: share of cuts that meet a boundary of the reference; 0 without cuts.
      recall: share of its boundaries that are met; 0 without any.
      f1: their harmonic mean.
      random_f1: the mean F1 of as many cuts in each row at random bytes.
      cuts, boundaries: how many there are.
    """

    precision: float
    recall: float
    f1: float
    random_f1: float
    cuts: int
    boundaries: int


def score_boundaries(
    cuts: Bool[np.ndarray, "B T"],
    reference: Bool[np.ndarray, "B T"],
    *,
    segment_ids: Int[np.ndarray, "B T"] | None = None,
    tolerance: int = 0,
    draws: int = 20,
    seed: int = 0,
) -> BoundaryScores:
    """Compare cuts with a reference, each boundary met by at most one cut.

    A document's first byte does not count: every model cuts there.

    Args:
      cuts: True where a patch ends.
      reference: True where one should.
      segment_ids: documents, 0 for padding; None is one document a row.
      tolerance: bytes that a cut may lie before or behind a boundary, in the same document.
      draws: of random cuts.
      seed: of the draws.

    Raises:
      ValueError: shapes differ, or a number is out of range.
    """
    if not cuts.shape == reference.shape or cuts.ndim != 2:
        raise ValueError(f"cuts {cuts.shape} and reference {reference.shape} must be rows of the same shape")
    whole("tolerance", tolerance, least=0)
    whole("draws", draws, least=1)
    segments = np.ones(cuts.shape, np.int32) if segment_ids is None else np.asarray(segment_ids)
    before = np.pad(segments[:, :-1], ((0, 0), (1, 0)))
    here = (segments > 0) & (segments == before)
    cuts, reference = cuts & here, reference & here
    found = _matched(cuts, reference, segments, tolerance)
    random = [
        _f1(_matched(drawn, reference, segments, tolerance), drawn, reference)
        for drawn in (_random(cuts, here, np.random.default_rng((seed, i))) for i in range(draws))
    ]
    return BoundaryScores(
        precision=found / max(int(cuts.sum()), 1),
        recall=found / max(int(reference.sum()), 1),
        f1=_f1(found, cuts, reference),
        random_f1=float(np.mean(random)),
        cuts=int(cuts.sum()),
        boundaries=int(reference.sum()),
    )


def _f1(found: int, cuts: np.ndarray, reference: np.ndarray) -> float:
    return 2 * found / max(int(cuts.sum()) + int(reference.sum()), 1)


def _matched(cuts: np.ndarray, reference: np.ndarray, segments: np.ndarray, tolerance: int) -> int:
    """Count the pairs of a cut and a boundary that meet, as many as there can be: from left to right, the nearest."""
    if tolerance == 0:
        return int((cuts & reference).sum())
    count, index = 0, np.arange(cuts.shape[1])
    for row in range(len(cuts)):
        begins = np.pad(segments[row, 1:] != segments[row, :-1], (1, 0))
        start = np.maximum.accumulate(np.where(begins, index, 0))
        wanted = iter(np.flatnonzero(reference[row]))
        boundary = next(wanted, None)
        for cut in np.flatnonzero(cuts[row]):
            first = max(cut - tolerance, start[cut])
            while boundary is not None and boundary < first:
                boundary = next(wanted, None)
            if boundary is None:
                break
            if boundary <= cut + tolerance and segments[row, boundary] == segments[row, cut]:
                count, boundary = count + 1, next(wanted, None)
    return count


def _random(cuts: np.ndarray, here: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return as many cuts in each row, at random bytes that count."""
    order = np.where(here, rng.random(cuts.shape), 2.0)
    rank = np.argsort(np.argsort(order, axis=1), axis=1)
    return rank < cuts.sum(1, keepdims=True)
