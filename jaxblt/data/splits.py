"""Train, validation and test parts: by document, by position, or by name. No part reads a byte of another."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import numpy as np

from jaxblt.data.permutation import hash64
from jaxblt.data.sources.base import DocumentSource
from jaxblt.data.sources.bed import BedSource
from jaxblt.data.sources.regions import Regions, whole

SplitName = Literal["train", "validation", "test", "all"]
PARTS = ("train", "validation", "test")


def check_split(name: str) -> None:
    """Raise ValueError unless `name` is a split."""
    if name not in get_args(SplitName):
        raise ValueError(f"unknown split {name!r}: choose one of {', '.join(map(repr, get_args(SplitName)))}")


def cut_points(totals: np.ndarray, fractions: Sequence[float]) -> np.ndarray:
    """Return Int64[N, 4], the parts' bounds in each of `totals`, by cumulative fractions.

    Raises:
      ValueError: not three fractions of at least 0 that sum to 1.
    """
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(
            f"fractions must be three numbers of at least 0 that sum to 1, got {tuple(fractions)}"
        )
    totals = np.asarray(totals, np.int64)
    inner = np.rint(np.multiply.outer(totals, np.cumsum(fractions[:2]))).astype(np.int64)
    return np.column_stack([np.zeros_like(totals), inner, totals])


def split_by_document(
    source: DocumentSource, name: SplitName, *, fractions: Sequence[float] = (0.8, 0.1, 0.1), seed: int = 0
) -> Regions:
    """Deal whole documents to the parts in a random order picked by `seed`.

    BED intervals that overlap may come into different parts; `split_by_position` keeps them apart.

    Raises:
      ValueError: an unknown split, or one that gets no document.
    """
    check_split(name)
    if name == "all":
        return whole(source)
    count, part = len(source), PARTS.index(name)
    low, high = cut_points(np.array([count]), fractions)[0, part : part + 2]
    order = np.argsort(np.array([hash64(seed, i) for i in range(count)], np.uint64), kind="stable")
    documents = np.sort(order[low:high])
    if not len(documents):
        raise ValueError(
            f"split {name!r} gets none of {count} documents at fractions {tuple(fractions)}: change them, or "
            "split by 'position'"
        )
    return whole(source, documents)


def split_by_position(
    source: DocumentSource, name: SplitName, *, fractions: Sequence[float] = (0.8, 0.1, 0.1)
) -> Regions:
    """Take the same share of every document, in order: train, then validation, then test.

    BED intervals are cut where their genome record is cut, so that intervals that overlap cannot leak.

    Raises:
      ValueError: an unknown split, or one that gets no byte.
    """
    check_split(name)
    if name == "all":
        return whole(source)
    part = PARTS.index(name)
    if isinstance(source, BedSource):
        starts, stops = _bed_ranges(source, part, fractions)
    else:
        starts, stops = cut_points(source.lengths, fractions)[:, part : part + 2].T
    kept = np.flatnonzero(stops > starts)
    if not len(kept):
        raise ValueError(
            f"split {name!r} gets no byte of documents of at most {source.lengths.max()} bytes at fractions "
            f"{tuple(fractions)}: change the fractions, or split by 'documents'"
        )
    return Regions(source, kept, starts[kept], stops[kept])


def _bed_ranges(source: BedSource, part: int, fractions: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Cut each interval's record in its own coordinates; padding goes to the outer parts."""
    ranges = []
    cuts = cut_points(source.genome.lengths, fractions)[source.records]
    for x, (low, high) in zip(source.intervals, cuts[:, part : part + 2], strict=True):
        low = max(int(low), x.start) if part > 0 else x.start
        high = min(int(high), x.stop) if part < 2 else x.stop
        ranges.append((x.stop - high, x.stop - low) if x.strand == "-" else (low - x.start, high - x.start))
    starts, stops = np.array(ranges, np.int64).T
    return starts, stops


def split_by_name(
    source: DocumentSource, name: SplitName, *, validation: Sequence[str] = (), test: Sequence[str] = ()
) -> Regions:
    """Take documents named by patterns (`*`, `?`, `[...]`).

    Documents that no pattern names are for training.

    Raises:
      ValueError: an unknown split, a pattern that matches nothing, a document in two parts, an empty part.
    """
    check_split(name)
    held = {"validation": _matching(source, validation), "test": _matching(source, test)}
    both = held["validation"] & held["test"]
    if both.any():
        document = source.names[int(both.argmax())]
        raise ValueError(f"document {document!r} is in validation and in test: make the patterns exclusive")
    chosen = held[name] if name in held else np.ones(len(source), bool)
    if name == "train":
        chosen = ~(held["validation"] | held["test"])
    if not chosen.any():
        raise ValueError(f"split {name!r} holds no document: give patterns of document names for it")
    return whole(source, np.flatnonzero(chosen))


def _matching(source: DocumentSource, patterns: Sequence[str]) -> np.ndarray:
    names = list(source.names)
    hits = [np.array([fnmatchcase(name, p) for name in names], bool) for p in patterns]
    for pattern, hit in zip(patterns, hits, strict=True):
        if not hit.any():
            raise ValueError(
                f"pattern {pattern!r} matches none of {len(source)} documents, such as {names[:3]}"
            )
    return np.any(hits, axis=0) if hits else np.zeros(len(source), bool)
