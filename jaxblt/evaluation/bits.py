"""Conversion of nats to bits per byte, with a confidence interval over documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return nats / (ln 2 * num_bytes): a summed negative log-likelihood as bits per byte.

    Count the bytes of the text itself. The loss of BOS and EOS belongs in `nats` if the model predicts them, but they
    are no bytes.

    Raises:
      ValueError: there are no bytes.
    """
    if num_bytes <= 0:
        raise ValueError(f"bits per byte need at least one byte, got {num_bytes}")
    return nats / (math.log(2.0) * num_bytes)


@dataclass(frozen=True)
class BitsPerByte:
    """A figure with the ends of its confidence interval."""

    value: float
    low: float
    high: float
    num_bytes: int
    num_documents: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def document_bits_per_byte(
    nats: Sequence[float] | Float[np.ndarray, " documents"],
    num_bytes: Sequence[int] | Int[np.ndarray, " documents"],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> BitsPerByte:
    """Return bits per byte of a set of documents, and the bootstrap interval over them.

    value = sum(nats) / (ln 2 * sum(bytes)): long documents weigh more, as in one long text. Documents, not
    bytes, are resampled: bytes of one document are not independent, and an interval over bytes would be far
    too narrow. A single document gives an interval of no width.

    Args:
      nats: summed negative log-likelihood of each document.
      num_bytes: bytes of each document.
      confidence: of the percentile interval.
      resamples: bootstrap samples.
      seed: of the resampling.

    Raises:
      ValueError: no documents, lengths that differ, or an empty document.
    """
    loss, sizes = np.asarray(nats, np.float64), np.asarray(num_bytes, np.int64)
    if loss.shape != sizes.shape or loss.ndim != 1 or not loss.size:
        raise ValueError(f"expected one loss and one size a document, got {loss.shape} and {sizes.shape}")
    if sizes.min() <= 0:
        raise ValueError(f"document {int(sizes.argmin())} holds no bytes: leave empty documents out")
    low, high = ratio_interval(
        loss / math.log(2.0), sizes, confidence=confidence, resamples=resamples, seed=seed
    )
    value = bits_per_byte(float(loss.sum()), int(sizes.sum()))
    return BitsPerByte(value, low, high, int(sizes.sum()), loss.size)


def ratio_interval(
    tops: Float[np.ndarray, " documents"],
    bottoms: Float[np.ndarray, " documents"] | Int[np.ndarray, " documents"],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of sum(tops) / sum(bottoms) over documents.

    A document's top and bottom are drawn together, so one model's share of another's nats is paired by document.

    Args:
      tops: of each document.
      bottoms: of each document, positive.
      confidence: of the interval.
      resamples: bootstrap samples.
      seed: of the resampling; draws depend on it and on the number of documents only.
    """
    drawn = np.random.default_rng(seed).integers(0, tops.size, (resamples, tops.size))
    samples = tops[drawn].sum(-1) / bottoms[drawn].sum(-1)
    low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
