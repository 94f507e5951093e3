"""BED intervals as documents: coordinates, strands, padding, errors."""

import gzip

import pytest

from jaxblt.data import (
    BedInterval,
    BedSource,
    BytesSource,
    open_bed,
    read_bed,
    read_document,
    reverse_complement,
)

GENOME = BytesSource([b"ACGTTGCAAC", b"GGGGCCCCAAnnRY"], ["chr1", "track1"])


def test_intervals_are_half_open_from_0(tmp_path):
    text = "track name=x\n#c\nchr1\t2\t5\n\ntrack1 0 4 peak\nchr1\t1\t6\tp\t0\t-\n"
    (tmp_path / "x.bed.gz").write_bytes(gzip.compress(text.encode()))
    source = open_bed(GENOME, tmp_path / "x.bed.gz")
    assert source.names == ["chr1:2-5", "track1:0-4 peak", "chr1:1-6 p"]
    assert source.lengths.tolist() == [3, 4, 5]
    assert [read_document(source, i) for i in range(3)] == [b"GTT", b"GGGG", reverse_complement(b"CGTTG")]


@pytest.mark.parametrize("strand", ["+", "-"])
def test_slices_and_padding(strand):
    source = BedSource(GENOME, [BedInterval("chr1", -3, 14, strand=strand)])
    full = b"NNN" + GENOME.documents[0] + b"NNNN"
    full = reverse_complement(full) if strand == "-" else full
    for start in range(18):
        for stop in range(start, 18):
            assert source.read(0, start, stop) == full[start:stop]


def test_without_padding_leaving_the_record_is_an_error():
    with pytest.raises(ValueError, match=r"'chr1:3-11' leaves the record \[0, 10\): clip it, or pad with N"):
        BedSource(GENOME, [BedInterval("chr1", 3, 11)], pad=False)
    assert len(BedSource(GENOME, [BedInterval("chr1", 3, 10)], pad=False)) == 1


def test_an_unknown_record_is_named():
    with pytest.raises(ValueError, match="'chrX:0-4': no such record in the FASTA, which has chr1, track1"):
        BedSource(GENOME, [BedInterval("chrX", 0, 4)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is empty"),
        ("# none\n", "has no BED interval"),
        ("chr1\t3\n", r"x.bed:1 is no BED line"),
        ("chr1\t3\t9\nchr1\tthree\t9\n", r"x.bed:2 is no BED line"),
        ("chr1\t9\t9\n", r"x.bed:1: interval chr1:9-9 holds no base"),
        ("chr1\t1\t9\tn\t0\t?\n", r"strand '\?' is none of"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    (tmp_path / "x.bed").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_bed(tmp_path / "x.bed")
