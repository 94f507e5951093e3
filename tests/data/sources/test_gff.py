"""Regions of BED, GFF3 and GTF files: coordinates, strands, names, features, errors."""

import gzip

import pytest

from jaxblt.data import open_regions, read_document, read_regions, reverse_complement

GFF = (
    "##gff-version 3\nchr1\tx\tgene\t2\t6\t.\t+\t.\tID=g1;Name=first\nchr1\tx\tCDS\t3\t4\t.\t-\t0\tParent=g1;Name=c\n"
    "##FASTA\n>chr1\nA\n"
)
GTF = (
    'chr1\tx\tgene\t2\t6\t.\t-\t.\tgene_id "g 1"; gene_name "n";\n'
    'chr1\tx\texon\t2\t3\t.\t+\t.\tgene_id "g 1"; transcript_id "t1";\n'
)


@pytest.fixture
def genome(tmp_path):
    (tmp_path / "g.fa").write_text(">chr1\nACGTTGCAAC\n")
    return tmp_path / "g.fa"


def test_regions_of_gff_count_from_1_and_include_the_end(genome, tmp_path):
    (tmp_path / "a.gff3.gz").write_bytes(gzip.compress(GFF.encode()))
    (tmp_path / "a.gtf").write_text(GTF)
    (tmp_path / "a.bed").write_text("chr1\t1\t6\tg1\t0\t+\n")
    gff = open_regions(genome, tmp_path / "a.gff3.gz")
    assert gff.names == ["chr1:1-6 g1", "chr1:2-4 c"]
    assert [read_document(gff, i) for i in range(2)] == [b"CGTTG", reverse_complement(b"GT")]
    gene, exon = read_regions(tmp_path / "a.gtf")
    assert (gene.start, gene.stop, gene.strand, gene.name, exon.name) == (1, 6, "-", "g 1", "t1")
    assert read_regions(tmp_path / "a.gff3.gz", feature="gene") == read_regions(tmp_path / "a.bed")


@pytest.mark.parametrize(
    ("name", "text", "feature", "message"),
    [
        (
            "a.gff",
            "chr1\tx\tgene\t0\t6\t.\t+\t.\t\n",
            None,
            "a.gff:1: chr1:0-6 holds no base; GFF counts from 1",
        ),
        ("a.gtf", "chr1 x gene 1 6\n", None, "a.gtf:1 is no line of GFF: 'chr1 x gene 1 6'"),
        ("a.gff", GFF, "exon", r"there is no feature 'exon', only \['CDS', 'gene'\]"),
        ("a.gff", "chr1\tx\tgene\t5\t60\t.\t+\t.\t\n", None, r"'chr1:4-60' leaves the record \[0, 10\)"),
        ("a.bed", "chr1\t1\t2\n", "gene", "feature = 'gene' is a column of GFF and GTF, and this is BED"),
    ],
)
def test_bad_regions_are_named(genome, tmp_path, name, text, feature, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        open_regions(genome, tmp_path / name, feature=feature)


def test_an_error_names_its_file_once(genome, tmp_path):
    (tmp_path / "a.bed").write_text("chr1\t5\t1\n")
    with pytest.raises(ValueError, match=r"a\.bed:1") as error:
        open_regions(genome, tmp_path / "a.bed")
    assert str(error.value).count("a.bed") == 1
    (tmp_path / "b.bed").write_text("chr1\t1\t5\n")
    (tmp_path / "twice.fa").write_text(">a\nAC\n>a\nAC\n")
    with pytest.raises(ValueError, match="record 'a' occurs twice") as error:
        open_regions(tmp_path / "twice.fa", tmp_path / "b.bed")
    assert "b.bed" not in str(error.value)
