"""Learned motifs before step 0: the strings that a sample of the data holds more often than chance."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxblt.patching.learned.config import BoundaryConfig

LEAST = 0.1
"""The least count times log(count / expected) of a string, over that of the first: below it is chance."""


def seed_motifs(
    config: BoundaryConfig,
    params: dict[str, Any],
    ids: Int[np.ndarray, "B T"],
    segment_ids: Int[np.ndarray, "B T"],
) -> dict[str, Any]:
    """Return the router's parameters with filters that match over-represented strings, for training to go on from.

    A loss that reads bytes well without patches says little of where motifs end, and leaves drawn filters as they are.
    A full match of the first string has response 1. The others weigh as much less as log(count / expected) is smaller.

    Args:
      config: of the router; one without learned motifs keeps its parameters.
      params: of the router, as they were drawn.
      ids: a sample of the data.
      segment_ids: documents, 0 for padding.
    """
    if not config.learned_motifs:
        return params
    table = np.zeros(params["motifs"].shape, np.float32)
    found = enriched_strings(ids, segment_ids, length=config.motif_length, count=config.learned_motifs)
    most = max((gain for _, gain in found), default=1.0)
    places = np.arange(config.motif_length)
    for k, (string, gain) in enumerate(found):
        table[places, string[::-1], k] = gain / most / config.motif_length
    return {**params, "motifs": jnp.asarray(table)}


def enriched_strings(
    ids: Int[np.ndarray, "B T"], segment_ids: Int[np.ndarray, "B T"], *, length: int, count: int
) -> list[tuple[Int[np.ndarray, "L"], float]]:
    """Return up to `count` strings that occur more often than their bytes' frequencies say, with log(count / expected).

    Each next one is that of the largest count times log(count / expected), where earlier ones do not overlap it. There
    are fewer if none is left that is far from chance.
    """
    windows = np.lib.stride_tricks.sliding_window_view(ids, length, axis=1)
    documents = np.lib.stride_tricks.sliding_window_view(segment_ids, length, axis=1)
    free = (documents[..., 0] > 0) & (documents[..., 0] == documents[..., -1])
    strings, inverse = np.unique(windows[free], axis=0, return_inverse=True)
    number = np.full(free.shape, -1)
    number[free] = inverse.reshape(-1)
    share = np.bincount(ids[segment_ids > 0]) / max((segment_ids > 0).sum(), 1)
    log_share = np.log(np.maximum(share, np.finfo(float).tiny))
    expected = np.exp(log_share[strings].sum(1)) * free.sum()
    found, first = [], 0.0
    for _ in range(count):
        counts = np.bincount(number[free], minlength=len(strings))
        gains = np.log(np.maximum(counts, 1) / expected)
        weights = counts * gains
        best = int(np.argmax(weights)) if len(strings) else 0
        if not len(strings) or weights[best] <= LEAST * first:
            break
        first = first or weights[best]
        found.append((strings[best], float(gains[best])))
        free &= ~_overlapped(number == best, length)
    return found


def _overlapped(matches: np.ndarray, length: int) -> np.ndarray:
    """Return the windows that share a byte with one that matches."""
    covered = np.zeros_like(matches)
    for by in range(1 - length, length):
        source = slice(max(-by, 0), matches.shape[1] - max(by, 0))
        target = slice(max(by, 0), matches.shape[1] - max(-by, 0))
        covered[:, target] |= matches[:, source]
    return covered
