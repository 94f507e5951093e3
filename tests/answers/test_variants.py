"""Ratios of variants against windows written down by hand, under a model whose probabilities are known."""

import dataclasses
import gzip
import math
import re
from collections import Counter
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest

from jaxblt.answers import Variant, read_vcf
from jaxblt.answers.variants import stream_variants
from jaxblt.data.sources import BytesSource
from jaxblt.data.vocab import BOS, VOCAB_SIZE
from tests.answers.runs import ROWS, ids_of, markov_run, random_probabilities

CONTEXT = 6
#      1         11
ONE = "ACGTACGGTTCAGGCATTAC"
FASTA = f">one\n{ONE}\n>two soft-masked\nggNacgt\n"
OTHER_STRAND = str.maketrans("ACGTacgtNn", "TGCAtgcaNn")
# chrom, pos, ref, alt, and the windows of six bytes: reference, alternate
CASES = [
    ("one", 5, "A", "G", "GTACGG", "GTGCGG"),
    ("one", 12, "A", "T", "TCAGGC", "TCTGGC"),
    ("one", 1, "A", "C", "ACGTAC", "CCGTAC"),  # nothing before it
    ("one", 20, "C", "T", "TAC", "TAT"),  # nothing behind it
    ("one", 7, "GG", "G", "ACGGTT", "ACGTTC"),  # a deletion draws in the base behind the window
    ("one", 9, "T", "TCA", "GTTCAG", "GTCATC"),  # an insertion pushes two out
    ("one", 13, "G", "A", "CAGGCA", "CAAGCA"),  # two alleles of one row
    ("one", 13, "G", "GT", "CAGGCA", "CAGTGC"),
    ("one", 16, "ATT", "GCC", "CATTAC", "CGCCAC"),
    ("two", 4, "A", "C", "gNacgt", "gNccgt"),  # the case of the reference
    ("one", 20, "C", "CGG", "ACNN", "ACGG"),  # N where the reference ends
]
ROWS_OF_VCF = """##fileformat=VCFv4.3
#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO
one\t5\trs1\tA\tG\t.\t.\t.
one\t12\t.\ta\tt\t.\t.\t.
one\t1\t.\tA\tC
one\t20\t.\tC\tT
one\t7\t.\tGG\tG
one\t9\t.\tT\tTCA
one\t13\tboth\tG\tA,GT
one\t16\t.\tATT\tGCC
two\t4\t.\tA\tC
one\t20\t.\tC\tCGG
"""


@pytest.fixture
def files(tmp_path):
    vcf, fasta = tmp_path / "calls.vcf.gz", tmp_path / "genome.fa"
    vcf.write_bytes(gzip.compress(ROWS_OF_VCF.encode()))
    fasta.write_text(FASTA)
    return vcf, fasta


def nats(p, text):
    return sum(math.log(p[a, b]) for a, b in pairwise([BOS, *ids_of(text.encode())]))


def other_strand(text):
    return text.translate(OTHER_STRAND)[::-1]


def dna_run(p, **data):
    return markov_run(p, kind="fasta", paths=("genome.fa",), **data)


def test_ratios_are_those_of_windows_by_hand(files, tmp_path):
    p = random_probabilities()
    found = dna_run(p).variants(*files, context=CONTEXT, batch_size=ROWS)
    assert [(v.chrom, v.pos, v.ref.upper(), v.alt.upper()) for v in found.variants] == [c[:4] for c in CASES]
    for i, (*_, ref, alt) in enumerate(CASES):
        assert len(ref) == len(alt)
        forward = nats(p, alt) - nats(p, ref)
        reverse = nats(p, other_strand(alt)) - nats(p, other_strand(ref))
        expected = [forward, reverse, (forward + reverse) / 2]
        ratios = [found.score_forward[i], found.score_reverse[i], found.score[i]]
        np.testing.assert_allclose(ratios, expected, atol=1e-5, err_msg=str(CASES[i]))
    found.to_tsv(tmp_path / "out.tsv")
    header, first, *_ = (tmp_path / "out.tsv").read_text().splitlines()
    assert header == "chrom\tpos\tid\tref\talt\tscore_forward\tscore_reverse\tscore\tqual\tfilter\tinfo"
    assert first.split("\t")[:5] == ["one", "5", "rs1", "A", "G"]
    assert float(first.split("\t")[7]) == pytest.approx(found.score[0], rel=1e-8)


def test_under_letters_of_known_frequency_a_ratio_is_theirs(files):
    """p(A) = 1/2, p(C) = 1/4, p(G) = p(T) = 1/8: A to G is log 1/4 forward and T to C is log 2 backward."""
    p = np.full((VOCAB_SIZE, VOCAB_SIZE), 1e-9)
    p[:, ids_of(b"ACGT")] = [1 / 2, 1 / 4, 1 / 8, 1 / 8]
    found = dna_run(p).variants(*files, context=CONTEXT, batch_size=ROWS)
    expected = [math.log(1 / 4), math.log(2), math.log(1 / 2) / 2]
    np.testing.assert_allclose(
        [found.score_forward[0], found.score_reverse[0], found.score[0]], expected, atol=1e-5
    )


def test_case_is_that_of_the_runs_data(files):
    """With upper case in training, the soft-masked record is raised, its alleles too."""
    p = random_probabilities()
    found = dna_run(p, soft_mask="upper").variants(*files, context=CONTEXT, batch_size=ROWS)
    np.testing.assert_allclose(found.score_forward[9], nats(p, "GNCCGT") - nats(p, "GNACGT"), atol=1e-5)


def test_windows_are_as_long_as_a_training_row_by_default(files):
    p = random_probabilities()
    found = dna_run(p).variants(*files, batch_size=ROWS)
    changed = ONE[:4] + "G" + ONE[5:]
    np.testing.assert_allclose(found.score_forward[0], nats(p, changed) - nats(p, ONE), atol=1e-4)


UNSCORED = [
    ("one\t5\t.\tA\t<DEL>", "symbolic allele"),
    ("one\t5\t.\tA\t*", "spanning deletion (*)"),
    ("one\t5\t.\tA\t.", "no alternate allele (.)"),
    ("one\t5\t.\tA\t<NON_REF>", "any other allele (<NON_REF>, <*>)"),
    ("one\t5\t.\tA\tG]two:3]", "breakend"),
    ("one\t5\t.\tA\tG.", "breakend"),
    ("one\t5\t.\tR\tG", "allele of other letters than ACGTN"),
    ("one\t5\t.\tA\t", "allele of other letters than ACGTN"),
    ("one\t0\t.\tN\tG", "telomere (POS 0)"),
    ("one\t5\t.\ta\tA", "ALT equal to REF"),
    ("chr1\t5\t.\tA\tG", "contig that the FASTA file lacks"),
    ("one\t5\t.\tA\tGGGGGGG", "allele longer than the windows"),
]
BAD = [
    (
        "one\t5\t.\tC\tG",
        "line 1, one:5: the VCF file expects reference allele 'C', the FASTA record of 20 bases holds 'A'",
    ),
    ("one\t20\t.\tCA\tC", "one:20: .* expects reference allele 'CA', .* holds 'C'"),
    ("one\t99\t.\tC\tA", "one:99 lies behind the end of the FASTA record, which has 20 bases"),
    ("one\t-1\t.\tA\tG", "POS must be a whole number from 0, got '-1'"),
    ("one 5 . A G", "line 1: expected at least 5 columns with tabs between .*, got 1"),
    ("#CHROM\tPOS", "holds no variant"),
]


def unread(tmp_path, text):
    """A file, records, and a run without parameters: what is wrong is told before anything is scored."""
    (tmp_path / "bad.vcf").write_text(text)
    run = dataclasses.replace(dna_run(random_probabilities()), params=None)
    source = BytesSource([ONE.encode(), b"ggNacgt"], ["one", "two"])
    return run, (tmp_path / "bad.vcf", source)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_named(tmp_path, row, message, skip):
    run, files = unread(tmp_path, row + "\n" + ("one\t5\t.\tA\tG\n" if row[0] != "#" else ""))
    with pytest.raises(ValueError, match=message):
        run.variants(*files, context=CONTEXT, batch_size=ROWS, skip=skip)


@pytest.mark.parametrize(("row", "kind"), UNSCORED)
def test_alleles_without_a_score_are_named_by_kind(tmp_path, row, kind):
    run, files = unread(tmp_path, f"one\t5\t.\tA\tG\n{row}\n")
    with pytest.raises(
        ValueError, match=rf"line 2, .*: {re.escape(kind)}, which has no score: .*\(--skip, skip=True\)"
    ):
        run.variants(*files, context=CONTEXT, batch_size=ROWS)
    run, files = unread(tmp_path, f"{row}\n")
    with pytest.raises(
        ValueError, match=rf"has no allele to score, only 1 {re.escape(kind)}: check both files"
    ):
        run.variants(*files, context=CONTEXT, batch_size=ROWS, skip=True)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("chrom", "note"),
    [
        ("chrone", "the FASTA file calls 'chrone' 'one': rename the contigs of one file"),
        ("NC_1", "the FASTA file has no 'NC_1', only 'one', 'two'"),
    ],
)
def test_the_contigs_of_the_fasta_file_are_named(tmp_path, chrom, note, skip):
    run, files = unread(tmp_path, f"{chrom}\t5\t.\tA\tG\n")
    with pytest.raises(ValueError, match=f"; {note}$"):
        run.variants(*files, context=CONTEXT, batch_size=ROWS, skip=skip)


def test_what_has_no_score_is_skipped_and_counted(files, tmp_path):
    """Alleles beside it are scored as they are without it."""
    p = random_probabilities()
    rows = [line for line in ROWS_OF_VCF.splitlines(keepends=True) if line[0] != "#"]
    mixed = [f"{row}\n{good}" for (row, _), good in zip(UNSCORED, rows, strict=False)]
    mixed[0] = mixed[0].replace("rs1\tA\tG", "rs1\tA\t*,G,<NON_REF>")
    (tmp_path / "mixed.vcf").write_text(
        "".join(mixed) + "".join(f"{row}\n" for row, _ in UNSCORED[len(rows) :])
    )
    found = dna_run(p).variants(tmp_path / "mixed.vcf", files[1], context=CONTEXT, batch_size=ROWS, skip=True)
    alone = dna_run(p).variants(*files, context=CONTEXT, batch_size=ROWS)
    assert [v[:5] for v in found.variants] == [v[:5] for v in alone.variants]
    np.testing.assert_array_equal(found.score, alone.score)
    expected = Counter(kind for _, kind in UNSCORED)
    expected.update(["spanning deletion (*)", "any other allele (<NON_REF>, <*>)"])
    assert found.skipped == expected
    assert alone.skipped == {}


def test_a_base_stands_for_a_code_of_the_reference(tmp_path):
    """VCF has no code but N: the windows hold the base of REF, in the reference's case."""
    p, rows = random_probabilities(), "one\t3\t.\tA\tG\none\t3\t.\tGT\tG\none\t5\t.\tC\tT\none\t7\t.\tN\tA\n"
    (tmp_path / "a.vcf").write_text(rows)
    source = BytesSource([b"ACRTyGNAC"], ["one"])
    found = dna_run(p).variants(tmp_path / "a.vcf", source, context=CONTEXT, batch_size=ROWS)
    windows = [("ACATyG", "ACGTyG"), ("ACGTyG", "ACGyGN"), ("RTcGNA", "RTtGNA"), ("TyGNAC", "TyGAAC")]
    expected = [nats(p, alt) - nats(p, ref) for ref, alt in windows]
    np.testing.assert_allclose(found.score_forward, expected, atol=1e-5)
    for ref in ("C", "T", "R"):
        (tmp_path / "a.vcf").write_text(f"one\t3\t.\t{ref}\tAA\n")
        with pytest.raises(ValueError, match=r"holds 'R'|allele of other letters"):
            dna_run(p).variants(tmp_path / "a.vcf", source, context=CONTEXT, batch_size=ROWS)


def test_what_else_a_row_says_is_carried_through(files, tmp_path, monkeypatch):
    """A few alleles are held at a time; rows without a column have a point."""
    p, held = random_probabilities(), []
    monkeypatch.setattr(import_module("jaxblt.answers.variants"), "AT_ONCE", 4)
    rows = "one\t5\trs1\tA\tG\t50\tPASS\tDP=9;AF=0.5\tGT:AD\t0|1:3,4\none\t13\t.\tG\tA,GT\n" * 4
    header = "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\tFORMAT\tNA12878\n"
    for text, sample in ((header + rows, "NA12878"), (rows, "sample_1")):
        (tmp_path / "a.vcf").write_text(text)
        for group in stream_variants(
            dna_run(p), tmp_path / "a.vcf", files[1], context=CONTEXT, batch_size=ROWS
        ):
            held.append(len(group))
        found = dna_run(p).variants(tmp_path / "a.vcf", files[1], context=CONTEXT, batch_size=ROWS)
        found.to_tsv(tmp_path / "out.tsv")
        lines = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
        assert lines[0][5:] == [
            "score_forward",
            "score_reverse",
            "score",
            "qual",
            "filter",
            "info",
            "format",
            sample,
        ]
        assert lines[1][8:] == ["50", "PASS", "DP=9;AF=0.5", "GT:AD", "0|1:3,4"]
        assert [line[8:] for line in lines[2:4]] == [["."] * 5] * 2
        assert [line[:5] for line in lines[1:]] == [[str(x) for x in v[:5]] for v in found.variants]
    assert held == [4, 4, 4] * 2
    (tmp_path / "a.vcf").write_text(header + "one\t5\t.\tA\tG" + "\t." * 9 + "\n")
    with pytest.raises(ValueError, match=r"line 2: .* at most 10, which its first lines have, got 14"):
        list(read_vcf(tmp_path / "a.vcf"))


def test_bad_files_are_named(files, tmp_path):
    run = dna_run(random_probabilities())
    empty = tmp_path / "empty.vcf"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty.vcf' is empty \(0 bytes\)"):
        run.variants(empty, files[1])
    with pytest.raises(FileNotFoundError, match=r"file does not exist: 'none\.vcf'"):
        run.variants("none.vcf", files[1])
    with pytest.raises(ValueError, match="context must be at least 2, got 1"):
        run.variants(*files, context=1)
    protein = BytesSource([b"MEACK"], ["one"])
    vcf = tmp_path / "one.vcf"
    vcf.write_text("one\t3\t.\tA\tG\n")
    with pytest.raises(ValueError, match=r"record 'one:3 A>G, reference window' has byte b'E' at position 1"):
        run.variants(vcf, protein, context=CONTEXT)


def test_rows_are_read_plain_or_compressed(files, tmp_path):
    plain = tmp_path / "plain.vcf"
    plain.write_text(ROWS_OF_VCF.replace("\n", "\r\n"))
    assert list(read_vcf(plain)) == list(read_vcf(files[0]))
    assert next(read_vcf(plain)) == Variant("one", 5, "rs1", "A", "G", (".", ".", "."))
