"""A check of a split: how many held-out records have a near-copy in training."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxblt.data.words import LENGTHS, find_words, kind_of

HELD, LETTERS = 256, 1 << 23
"""The most records that are looked for, and letters of training records that they are looked for in."""
LEAST = 0.01
"""The least share of near-copies that gives a warning."""


class NearCopyWarning(UserWarning):
    """Validation or test records have near-copies in training."""


class NearCopies(NamedTuple):
    """The numbers of records that have a near-copy.

    Attributes:
      share: of `records`.
      records: that were looked for.
      length: letters of the words that were compared.
    """

    share: float
    records: int
    length: int


def find_near_copies(
    train: Sequence[bytes], held: Sequence[bytes], *, length: int | None = None, share: float = 0.5
) -> NearCopies:
    """Count held-out records that are in training, or share at least `share` of their words with a training record.

    Both sides are samples, at even distances, so that it takes about a second; of large training sets the share is a
    lower bound.

    Args:
      train, held: sequences.
      length: letters of a word (see `jaxblt.data.words`); None takes `LENGTHS` of the records' kind.
      share: of words.
    """
    held = _spread(held, HELD)
    mean = max(sum(map(len, train)) / max(len(train), 1), 1)
    train = _spread(train, int(LETTERS / mean))
    kind = kind_of([*held, *train])
    length = LENGTHS[kind] if length is None else length
    asked = find_words(held, length, kind, both_strands=True)
    words, column = np.unique(asked.code, return_inverse=True)
    have = _sets(asked.record, column, (len(held), len(words)))
    given = find_words(train, length, kind, both_strands=True)
    place = np.searchsorted(words, given.code)
    found = np.append(words, -1)[place] == given.code
    seen = _sets(given.record[found], place[found], (len(train), len(words)))
    most = (have @ seen.T).max(1).toarray().ravel() if len(held) and len(train) else np.zeros(len(held))
    near = most >= np.maximum(share * np.asarray(have.sum(1)).ravel() - 1e-9, 1)
    known = set(train)  # Records may be shorter than a word
    near |= np.array([record in known for record in held], bool)
    return NearCopies(float(near.mean()) if len(near) else 0.0, len(held), length)


def warn_near_copies(train: Sequence[bytes], held: Sequence[bytes]) -> None:
    """Look for near-copies of held-out records in training, and warn of more than a few.

    Warns:
      NearCopyWarning: one of a hundred or more has one.
    """
    found = find_near_copies(train, held)
    if found.share >= LEAST:
        warnings.warn(
            f"{found.share:.0%} of {found.records} sampled records of validation and test are training records, or "
            f"share half of their {found.length}-letter words with one, so their figures are of what training has "
            "nearly seen: data.split = 'groups' keeps near-copies in one part",
            NearCopyWarning,
            stacklevel=3,
        )


def _spread(sequences: Sequence[bytes], most: int) -> list[bytes]:
    count = min(len(sequences), max(most, 1))
    return [sequences[i] for i in np.linspace(0, len(sequences) - 1, count).astype(int)]


def _sets(record: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> Any:
    """Return which records have which words, Int32 of zeros and ones."""
    from scipy.sparse import csr_matrix  # here, as few runs look for copies

    sets = csr_matrix((np.ones(len(record), np.int32), (record, column)), shape=shape)
    sets.sum_duplicates()
    sets.data[:] = 1
    return sets
