"""Groups of near-copies among records."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxblt.data.words import LENGTHS, kind_of, word_sets

ROWS = 4096
"""Records that are looked up at once."""
ENTRIES = 1 << 22
"""Words of pairs that are compared at once."""


def group_records(sequences: Sequence[bytes], *, length: int | None = None, share: float = 0.5) -> np.ndarray:
    """Return the number of each record's group, Int[N].

    Near-copies, and what near-copies link, are one group. Two records are near-copies if they share at least `share` of
    the words of the one that has fewer, and one at the least. Groups are the connected components of this relation
    (single linkage). They are exact: a pair is left out only where a bound rules it out. They depend on nothing but the
    set of records.

    Args:
      sequences: of the records; see `jaxblt.data.words` for what a word is.
      length: letters of a word; None takes `LENGTHS` of the records' kind.
      share: of words, above 0 and at most 1.

    Raises:
      ValueError: most records are shorter than a word, and would be near-copies of equal ones only.
    """
    kind = kind_of(sequences)
    length = LENGTHS[kind] if length is None else length
    if 2 * (short := sum(len(sequence) < length for sequence in sequences)) > len(sequences):
        raise ValueError(
            f"{short} of {len(sequences)} records have fewer letters than the words that near-copies are known by: "
            f"set group_k = {length} to a third of their length or less"
        )
    sizes, holders = word_sets(sequences, length, kind)
    least = np.maximum(np.ceil(share * sizes - 1e-9), 1).astype(np.int64)
    groups = _components(len(least), *_link_neighbours(holders, least))
    left, right = _link_groups(holders.T.tocsr(), least, groups)
    return _components(int(groups.max(initial=-1)) + 1, groups[left], groups[right])[groups]


def _components(count: int, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    from scipy.sparse import csgraph, csr_matrix  # here, as few runs group records

    graph = csr_matrix((np.ones(len(left), np.int8), (left, right)), shape=(count, count))
    return csgraph.connected_components(graph, directed=False)[1].astype(np.int64)


def _link_neighbours(holders: Any, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of near-copies that stand side by side among the holders of enough words.

    In a set of many near-copies most records have such a neighbour, so it need not be compared pair by pair.
    """
    word = np.repeat(np.arange(holders.shape[0]), np.diff(holders.indptr))
    pairs = holders.indices[:-1].astype(np.int64) * len(least) + holders.indices[1:]
    found, shared = np.unique(pairs[word[1:] == word[:-1]], return_counts=True)
    left, right = np.divmod(found, len(least))
    near = shared >= np.minimum(least[left], least[right])
    return left[near], right[near]


def _link_groups(sets: Any, least: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of near-copies of different groups.

    Of n words of which m or more are shared, any n - m + 1 hold a shared one. So a record looks up only that many of
    its words, those that the fewest groups have, and meets every record that has as many words and is a near-copy.
    """
    spread = np.bincount(_union(sets, groups).indices, minlength=sets.shape[1])
    words = np.argsort(spread, kind="stable")[np.count_nonzero(spread < 2) :]
    sets = sets[:, words]
    sets.sort_indices()
    union, held = _union(sets, groups), np.diff(sets.indptr)
    probing = np.flatnonzero(held >= least)
    members, begins = np.argsort(groups, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(groups))])
    found = []
    for start in range(0, len(probing), ROWS):
        rows = probing[start : start + ROWS]
        record, group = (_first_words(sets[rows], (held - least + 1)[rows]) @ union.T).nonzero()
        record = rows[record]
        apart = groups[record] != group
        record, group = record[apart], group[apart]
        likely = _overlaps(sets, record, union, group) >= least[record]
        record, group = record[likely], group[likely]
        sizes = np.diff(begins)[group]
        place = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        other, record = members[np.repeat(begins[group], sizes) + place], np.repeat(record, sizes)
        near = _overlaps(sets, record, sets, other) >= np.minimum(least[record], least[other])
        found.append(np.stack([record[near], other[near]]))
    left, right = np.concatenate([np.zeros((2, 0), np.int64), *found], 1)
    return left, right


def _union(sets: Any, groups: np.ndarray) -> Any:
    """Return which words each group has."""
    ones = np.ones(len(groups), np.int32)
    union: Any = type(sets)((ones, (groups, np.arange(len(groups))))) @ sets
    union.data[:] = 1
    return union


def _first_words(sets: Any, counts: np.ndarray) -> Any:
    """Return the first so many words of each record."""
    held = np.diff(sets.indptr)
    place = np.arange(sets.nnz) - np.repeat(sets.indptr[:-1], held)
    kept = place < np.repeat(counts, held)
    ends = np.concatenate([[0], np.cumsum(np.minimum(held, counts))])
    return type(sets)((sets.data[kept], sets.indices[kept], ends), shape=sets.shape)


def _overlaps(left: Any, rows: np.ndarray, right: Any, others: np.ndarray) -> np.ndarray:
    """Count the words that each row of `left` shares with the row of `right` beside it."""
    entries = np.cumsum(np.diff(left.indptr)[rows] + np.diff(right.indptr)[others])
    cuts = np.searchsorted(entries, np.arange(ENTRIES, entries[-1] if len(entries) else 0, ENTRIES))
    pairs = zip(np.split(rows, cuts), np.split(others, cuts), strict=True)
    found = [np.asarray(left[a].multiply(right[b]).sum(1)).ravel() for a, b in pairs if len(a)]
    return np.concatenate([np.zeros(0, np.int64), *found])
