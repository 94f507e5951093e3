"""Parts of records for training, validation and test: a group of near-copies lies in one part."""

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from jaxblt.data.groups import group_records


def deal_records(
    sequences: Sequence[bytes],
    labels: Sequence[Sequence[Hashable]],
    *,
    length: int | None = None,
    share: float = 0.5,
    fractions: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
) -> list[int]:
    """Return the part of each record, so that near-copies lie in one part.

    See `group_records` and `deal_groups`.
    """
    if not sequences:
        return []
    groups = group_records(sequences, length=length, share=share)
    return deal_groups(sequences, groups, labels, fractions=fractions, seed=seed).tolist()


def deal_groups(
    sequences: Sequence[bytes],
    groups: np.ndarray,
    labels: Sequence[Sequence[Hashable]],
    *,
    fractions: Sequence[float],
    seed: int = 0,
) -> np.ndarray:
    """Deal whole groups to parts and return the part of each record, Int[N].

    Parts have their shares of each label. Larger groups are dealt first, by powers of two, and groups of one power in
    an order that `seed` picks. Each goes to the part where it lowers Σ (records - wanted)² / wanted most. The sum is
    over parts, and in each over all records and those of each label.

    Args:
      sequences: of the records.
      groups: of the records, as of `group_records`.
      labels: of each record, any number.
      fractions: the shares of the parts; they sum to 1.
      seed: see there.

    Raises:
      ValueError: there are fewer groups than parts.
    """
    order = _dealing_order(sequences, groups, seed)
    parts = [part for part, fraction in enumerate(fractions) if fraction > 0]
    if len(order) < len(parts):
        raise ValueError(
            f"{len(groups)} records are {len(order)} group{'s' * (len(order) != 1)} of near-copies, and fractions = "
            f"{tuple(fractions)} ask for {len(parts)} parts: raise group_share or group_k, or give parts by "
            "split='column'"
        )
    held = [Counter[Hashable]() for _ in order]
    for group, own in zip(groups.tolist(), labels, strict=True):
        held[group].update([None, *enumerate(own)])
    total = sum(held, Counter[Hashable]())
    open_parts = {part: _Part({key: fractions[part] * n for key, n in total.items()}) for part in parts}
    dealt = np.zeros(len(order), np.int64)
    for group in order:
        dealt[group] = max(parts, key=lambda part: open_parts[part].gain(held[group]))
        open_parts[dealt[group]].take(held[group])
    return dealt[groups]


class _Part:
    """A part that is being filled: how many records of each label it wants, and how many are missing."""

    def __init__(self, wanted: dict[Hashable, float]) -> None:
        self.wanted, self.missing = wanted, dict(wanted)

    def gain(self, counts: Counter[Hashable]) -> float:
        """Return by how much Σ missing² / wanted falls if the part takes a group."""
        # Keep the order of records out of the last digit, which may decide.
        return math.fsum(n * (2 * self.missing[key] - n) / self.wanted[key] for key, n in counts.items())

    def take(self, counts: Counter[Hashable]) -> None:
        for key, count in counts.items():
            self.missing[key] -= count


def _dealing_order(sequences: Sequence[bytes], groups: np.ndarray, seed: int) -> list[int]:
    """Order groups by size, and groups of a like size by the smallest hash of their records."""
    first: dict[int, bytes] = {}
    key = seed.to_bytes(4, "little")
    for group, sequence in zip(groups.tolist(), sequences, strict=True):
        digest = hashlib.blake2b(sequence.upper(), digest_size=16, key=key).digest()
        first[group] = min(digest, first.get(group, digest))
    sizes = np.bincount(groups).tolist()
    return sorted(first, key=lambda group: (-sizes[group].bit_length(), first[group]))
