"""Tracks of bases: coordinates, strands, overlaps, and both formats read back."""

import numpy as np
import pytest

from jaxblt.answers.reports.tracks import write_track
from jaxblt.data import BedInterval, BedSource, BytesSource

GENOME = BytesSource([b"ACGTTGCAAC", b"GGGGCC"], ["chr2", "chr1"])
REGIONS = BedSource(
    GENOME, [BedInterval("chr2", 2, 5, strand="-"), BedInterval("chr2", 4, 7), BedInterval("chr1", 0, 2)]
)
VALUES = [np.array([1.0, 2.0, 3.0]), np.array([5.0, np.nan, 7.0]), np.array([-0.5, -0.5])]
WANTED = [
    ("chr1", 0, 2, -0.5),
    ("chr2", 2, 3, 3.0),
    ("chr2", 3, 4, 2.0),
    ("chr2", 4, 5, 3.0),
    ("chr2", 6, 7, 7.0),
]


def test_bedgraph_has_bases_where_they_lie_and_means_where_regions_overlap(tmp_path):
    write_track(tmp_path / "a.bedgraph", REGIONS, VALUES)
    rows = [line.split("\t") for line in (tmp_path / "a.bedgraph").read_text().splitlines()]
    assert [(r, int(a), int(b), float(v)) for r, a, b, v in rows] == WANTED
    write_track(tmp_path / "b.bg", GENOME, [np.zeros(10), np.arange(6.0)])
    first = (tmp_path / "b.bg").read_text().splitlines()
    assert (first[0], first[-1], len(first)) == ("chr1\t0\t1\t0", "chr2\t0\t10\t0", 7)


def test_bigwig_reads_back(tmp_path):
    import pybigtools

    write_track(tmp_path / "a.bw", REGIONS, VALUES)
    with pybigtools.open(str(tmp_path / "a.bw")) as file:
        assert file.chroms() == {"chr1": 6, "chr2": 10}
        found = [(name, *one) for name in ("chr1", "chr2") for one in file.records(name)]
    assert found == WANTED
    assert [path.name for path in tmp_path.iterdir()] == ["a.bw"]


def test_bad_tracks_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"track '.*a.wig' must end in one of .bedgraph, .bg, .bw, .bigwig"):
        write_track(tmp_path / "a.wig", REGIONS, VALUES)
    with pytest.raises(ValueError, match="chr2:2-5 has 3 bases and 2 values: give one a base"):
        write_track(tmp_path / "a.bg", REGIONS, [VALUES[0][:2], *VALUES[1:]])
