"""Splits: every byte in exactly one part, by document, position, name, and for BED by genome position."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import (
    BedInterval,
    BedSource,
    BytesSource,
    split_by_document,
    split_by_name,
    split_by_position,
    whole,
)
from jaxblt.data.splits import PARTS

DOCUMENTS = BytesSource(
    [bytes([65 + i]) * (i + 20) for i in range(10)], [f"set{i % 3}/{i}.txt" for i in range(10)]
)


def bytes_of(part):
    return sorted(
        (int(d), p)
        for d, a, b in zip(part.documents, part.starts, part.stops, strict=True)
        for p in range(int(a), int(b))
    )


def all_bytes(source):
    return bytes_of(whole(source))


def check_parts(source, parts):
    together = sorted(x for part in parts.values() for x in bytes_of(part))
    assert together == all_bytes(source)


def test_by_document_is_a_partition_of_the_right_sizes():
    parts = {name: split_by_document(DOCUMENTS, name) for name in PARTS}
    assert [len(parts[name]) for name in PARTS] == [8, 1, 1]
    check_parts(DOCUMENTS, parts)
    assert all(part.ends.all() for part in parts.values())


def test_the_seed_picks_the_documents():
    picked = {tuple(split_by_document(DOCUMENTS, "test", seed=s).documents) for s in range(40)}
    assert len(picked) > 5
    again = split_by_document(DOCUMENTS, "test", seed=3)
    assert again.documents.tolist() == split_by_document(DOCUMENTS, "test", seed=3).documents.tolist()


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=6), st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.3, 0.2)])
)
def test_by_position_is_a_partition_in_order(lengths, fractions):
    source = BytesSource([b"A" * n for n in lengths])
    parts = {}
    for name in PARTS:
        try:
            parts[name] = split_by_position(source, name, fractions=fractions)
        except ValueError as error:
            assert "gets no byte" in str(error)  # noqa: PT017
    check_parts(source, parts)
    cuts = np.cumsum(fractions)
    for share, (name, part) in enumerate(parts.items()):
        for d, a, b in zip(part.documents, part.starts, part.stops, strict=True):
            edge = cuts[PARTS.index(name)] * lengths[int(d)]
            assert abs(b - edge) <= 0.5 + 1e-9
            assert part.source.lengths[d] >= b > a >= 0
        assert share < 3


def test_ten_thousand_positions_split_80_10_10():
    source = BytesSource([b"A" * 10_000])
    parts = [split_by_position(source, name) for name in PARTS]
    assert [(int(p.starts[0]), int(p.stops[0])) for p in parts] == [(0, 8000), (8000, 9000), (9000, 10_000)]
    assert [bool(p.ends[0]) for p in parts] == [False, False, True]


def test_by_name():
    def parts(name):
        return split_by_name(DOCUMENTS, name, validation=("set1/*",), test=("set2/*",))

    check_parts(DOCUMENTS, {name: parts(name) for name in PARTS})
    assert {n.split("/")[0] for n in parts("validation").names} == {"set1"}
    assert {n.split("/")[0] for n in parts("train").names} == {"set0"}
    assert len(parts("all")) == 10


intervals = st.lists(
    st.tuples(st.integers(-20, 119), st.integers(1, 60), st.sampled_from("+-.")).map(
        lambda x: BedInterval("chr1", x[0], x[0] + x[1], strand=x[2])
    ),
    min_size=1,
    max_size=8,
)


@given(intervals)
def test_bed_intervals_are_cut_where_the_genome_is(found):
    """No base of the genome is in two parts, however intervals overlap, and none of an interval is lost."""
    source = BedSource(BytesSource([b"A" * 100], ["chr1"]), found)
    parts, genome = {}, {}
    for name in PARTS:
        try:
            parts[name] = split_by_position(source, name)
        except ValueError:
            continue
        genome[name] = set()
        for d, p in bytes_of(parts[name]):
            x = found[d]
            genome[name].add(x.stop - 1 - p if x.strand == "-" else x.start + p)
    check_parts(source, parts)
    for name, positions in genome.items():
        low, high = {"train": (-999, 80), "validation": (80, 90), "test": (90, 999)}[name]
        assert all(low <= p < high for p in positions)


def test_what_is_wrong_is_named():
    wrong: Any = "dev"
    for rule in (split_by_document, split_by_position, split_by_name):
        with pytest.raises(
            ValueError, match="unknown split 'dev': choose one of 'train', 'validation', 'test', 'all'"
        ):
            rule(DOCUMENTS, wrong)
    with pytest.raises(ValueError, match=r"fractions must be three numbers .* got \(0.9, 0.2, 0.1\)"):
        split_by_document(DOCUMENTS, "train", fractions=(0.9, 0.2, 0.1))
    with pytest.raises(ValueError, match=r"split 'test' gets none of 2 documents .* split by 'position'"):
        split_by_document(BytesSource([b"a", b"b"]), "test")
    with pytest.raises(ValueError, match="split 'validation' gets no byte of documents of at most 3 bytes"):
        split_by_position(BytesSource([b"abc"]), "validation", fractions=(1.0, 0.0, 0.0))
    with pytest.raises(
        ValueError, match=r"pattern 'x\*' matches none of 10 documents, such as \['set0/0.txt'"
    ):
        split_by_name(DOCUMENTS, "train", test=("x*",))
    with pytest.raises(ValueError, match=r"'set0/0.txt' is in validation and in test"):
        split_by_name(DOCUMENTS, "train", validation=("set0/*",), test=("*0.txt",))
    with pytest.raises(ValueError, match="split 'test' holds no document: give patterns"):
        split_by_name(DOCUMENTS, "test", validation=("set0/*",))
