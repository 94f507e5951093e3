"""Files as people have them: one table says what each is read as, or refused for; docs/guides/files.md shows it.

`python -m tests.data.sources.test_real_files` writes the page.
"""

import bz2
import gzip
import io
import lzma
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxblt.answers import read_vcf
from jaxblt.data import ArrowSource, FastaSource, JsonlSource, TextSource, read_bed, read_document
from jaxblt.data.sources.labelled import Columns, read_labelled

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "files.md"
HEADING = "## Which files are read\n"
LEGEND = (
    "One table per format. The third column says whether jaxblt reads such a file, or begins the error with which it "
    "refuses the file.\n"
)
NOBODY = 54321
"""A user without rights, as whom the table is read too where the tests run as root."""


class Refused(NamedTuple):
    """An error that has these words."""

    words: str


class Row(NamedTuple):
    """A file: what is special about it, its name and bytes, and what comes of it."""

    about: str
    name: str
    data: bytes | Callable[[], bytes]
    found: Any
    note: str = "read"


def documents(source: Any) -> list[bytes]:
    return [read_document(source, i) for i in range(len(source))]


def records(path: Path) -> dict[str, bytes]:
    source = FastaSource(path)
    return dict(zip(source.names, documents(source), strict=True))


def rows_of(path: Path) -> list[tuple[bytes, str]]:
    found = read_labelled(path, Columns("sequence", ("label",), "id", None), labels=None, genome=None)
    return [(record.sequence, record.label) for record in found]


READERS: dict[str, Callable[[Path], Any]] = {
    "Text": lambda path: read_document(TextSource(path), 0),
    "FASTA": records,
    "JSON lines": lambda path: documents(JsonlSource(path)),
    "Tables": rows_of,
    "BED": lambda path: [(x.record, x.start, x.stop) for x in read_bed(path)],
    "VCF": lambda path: [str(variant) for variant in read_vcf(path)],
    "Parquet and Arrow": lambda path: documents(ArrowSource(path)),
}


def bgzip(*parts: bytes, end: bool = True) -> bytes:
    """Blocks as bgzip writes them: members of gzip that hold their own sizes, and an empty one at the end."""
    blocks = []
    for part in (*parts, *[b""] * end):
        packed = zlib.compressobj(6, zlib.DEFLATED, -15)
        body = packed.compress(part) + packed.flush()
        head = b"\x1f\x8b\x08\x04" + bytes(5) + b"\xff\x06\x00BC\x02\x00" + struct.pack("<H", len(body) + 25)
        blocks.append(head + body + struct.pack("<II", zlib.crc32(part), len(part)))
    return b"".join(blocks)


def archive(make: Callable[[io.BytesIO], Any]) -> bytes:
    held = io.BytesIO()
    make(held)
    return held.getvalue()


def zipped(held: io.BytesIO) -> None:
    with zipfile.ZipFile(held, "w") as file:
        file.writestr("a.txt", "ACGT")


def tarred(held: io.BytesIO) -> None:
    with tarfile.open(fileobj=held, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))


def arrow(values: list[Any], kind: str = "file", name: str = "text") -> Callable[[], bytes]:
    """A column of an Arrow file or stream, of Feather, or of Parquet."""

    def made() -> bytes:
        import pyarrow as pa
        import pyarrow.feather
        import pyarrow.parquet

        table, held = pa.table({name: pa.array(values)}), io.BytesIO()
        if kind == "parquet":
            pyarrow.parquet.write_table(table, held)
        elif kind == "feather":
            pyarrow.feather.write_feather(table, held)
        else:
            with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(held, table.schema) as writer:
                writer.write_table(table)
        return held.getvalue()

    return made


def cut(make: Callable[[], bytes], end: int) -> Callable[[], bytes]:
    return lambda: make()[:end]


BOM = b"\xef\xbb\xbf"
FA, TWO = b">a\nACGT\nAC\n>b\nGG\n", {"a": b"ACGTAC", "b": b"GG"}
CSV, LABELS = b"sequence,label\nACGT,x\nGG,y\n", [(b"ACGT", "x"), (b"GG", "y")]
BED, PARTS = b"chr1\t0\t9\nchr2\t5\t6\n", [("chr1", 0, 9), ("chr2", 5, 6)]
LINES, TEXTS = b'{"text": "a"}\n{"text": "\xc3\xa9"}\n', [b"a", "\u00e9".encode()]
ROW = "c1\t5\trs1\tA\tG\t50\tPASS\tDP=9\n"
COLUMNS = "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"


def vcf(rows: str = ROW, version: str = "4.3") -> bytes:
    return f"##fileformat=VCFv{version}\n{COLUMNS}{rows}".encode()


FASTQ = Refused("has a line that starts with '@' before its first '>' line, as FASTQ has: write it as FASTA")
TABLE: dict[str, tuple[Row, ...]] = {
    "Text": (
        Row("Windows line ends", "a.txt", b"one\r\ntwo\r\n", b"one\r\ntwo\r\n", "read, line ends as they are"),
        Row("no line end at the end", "a.txt", b"one", b"one"),
        Row("bytes that are not UTF-8", "a.txt", b"caf\xe9\n", b"caf\xe9\n", "read, bytes as they are"),
        Row("a byte-order mark", "a.txt", BOM + b"one", b"one", "read, the mark left out"),
        Row("UTF-16 with a mark", "a.txt", "caf\u00e9".encode("utf-16"), "caf\u00e9".encode(), "read as UTF-8"),
        Row("UTF-32 with a mark", "a.txt", "caf\u00e9".encode("utf-32"), "caf\u00e9".encode(), "read as UTF-8"),
        Row("UTF-16 without a mark", "a.txt", "cafe".encode("utf-16-le"),
            Refused("is UTF-16 without a byte-order mark")),
        Row("UTF-16 without a mark, big-endian", "a.txt", "caf\u2014 \u00e9 and tea".encode("utf-16-be"),
            Refused("is UTF-16 without a byte-order mark: re-encode it with iconv -f UTF-16BE")),
        Row("UTF-32 without a mark", "a.txt", "caf\u2014".encode("utf-32-le"),
            Refused("is UTF-32 without a byte-order mark")),
        Row("one zero byte in a few", "a.txt", b"id1\0a", b"id1\0a", "kept"),
        Row("a mark and nothing else", "a.txt", BOM, Refused("is empty (0 bytes)")),
        Row("a mark of UTF-16 before other bytes", "a.txt", b"\xff\xfea\x00\x00",
            Refused("begins with the mark of UTF-16")),
        Row("gzip", "a.txt.gz", gzip.compress(b"one"), b"one"),
        Row("gzip, capital letters", "A.TXT.GZ", gzip.compress(b"one"), b"one"),
        Row("gzip under another name", "a.txt", gzip.compress(b"one"), b"one", "read, decompressed"),
        Row("members of gzip one after the other", "a.gz", gzip.compress(b"one") + gzip.compress(b"two"), b"onetwo"),
        Row("gzip, then zeros", "a.gz", gzip.compress(b"one") + bytes(9), b"one"),
        Row("xz", "a.txt.xz", lzma.compress(b"one"), b"one"),
        Row("bzip2", "a.txt.bz2", bz2.compress(b"one"), b"one"),
        Row("bgzip", "a.txt.bgz", bgzip(b"one", b"two"), b"onetwo"),
        Row("bgzip, broken off at a block", "a.gz", bgzip(b"one", end=False),
            Refused("is truncated: a bgzip file ends with")),
        Row("gzip, broken off", "a.gz", gzip.compress(b"one")[:-9], Refused("is damaged or not a whole gzip file")),
        Row("xz, broken off", "a.xz", lzma.compress(b"one")[:-9], Refused("is damaged or not a whole xz file")),
        Row("bzip2, broken off", "a.bz2", bz2.compress(b"one")[:-9], Refused("is damaged or not a whole bzip2 file")),
        Row("gzip, a byte changed", "a.gz", gzip.compress(b"one")[:-8] + bytes(8),
            Refused("is damaged or not a whole gzip")),
        Row("gzip twice", "a.gz", gzip.compress(gzip.compress(b"one")), Refused("is compressed twice (gzip)")),
        Row("plain text called .gz", "a.gz", b"one", Refused("is damaged or not a .gz file (it begins with b'one')")),
        Row("a zip archive called .gz", "a.gz", archive(zipped), Refused("is a zip archive (as .xlsx, .docx, .npz")),
        Row("a tar archive in gzip", "a.tar.gz", gzip.compress(archive(tarred)),
            Refused("holds, once decompressed, a tar arc")),
        Row("no byte", "a.txt", b"", Refused("is empty (0 bytes): remove it from the paths")),
        Row("gzip of no byte", "a.gz", gzip.compress(b""), Refused("is empty (0 bytes)")),
        Row("zstd", "a.zst", b"\x28\xb5\x2f\xfd\x04\x00",
            Refused("is a zstd file, which is not read as text: decompress it")),
        Row("lzma", "a.txt.lzma", lzma.compress(b"one", lzma.FORMAT_ALONE),
            Refused("is an lzma file, which is not read as text: decompress it")),
        Row("lzma of a known size", "a.txt", b"\x5d\0\0\x80\0" + (1 << 30).to_bytes(8, "little") + b"\0",
            Refused("is an lzma file, which is not read as text: decompress it")),
        Row("compress", "a.txt.Z", b"\x1f\x9d\x90one",
            Refused("is a file of compress (.Z), which is not read as text: decompress it")),
        Row("Parquet", "a.txt", arrow(["one"], "parquet"),
            Refused("is a Parquet file, which is not read as text: read it with")),
        Row("an Arrow stream", "a.txt", arrow(["one"], "stream"),
            Refused("is an Arrow stream, which is not read as text")),
        Row("HDF5", "a.h5ad", b"\x89HDF\r\n\x1a\n\x00", Refused("is an HDF5 file")),
        Row("SQLite", "a.db", b"SQLite format 3\x00\x10", Refused("is a SQLite database")),
        Row("PDF", "a.txt", b"%PDF-1.7\n",
            Refused("is a PDF, which is not read as text: extract its text with pdftotext")),
        Row("a NumPy array", "a.npy", archive(lambda held: np.save(held, np.zeros(2))), Refused("is a NumPy array")),
        Row("a pickle", "a.pkl", pickle.dumps(["one"]), Refused("is a pickle")),
        Row("a program", "a", b"\x7fELF\x02\x01\x01\x00",
            Refused("is a program (ELF), which is not read as text: data.kind=")),
        Row("a picture", "a.png", b"\x89PNG\r\n\x1a\n\x00", Refused("is a PNG image")),
        Row("an old Excel file", "a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", Refused("is an old file of Office")),
        Row("a pointer of Git LFS", "a", b"version https://git-lfs.github.com/spec/v1\n", Refused("run git lfs pull")),
    ),
    "FASTA": (
        Row("lines of one length", "a.fa", FA, TWO, "read where it lies, through a `.fai` index"),
        Row("lines of other lengths", "a.fa", b">a\nAC\nGTAC\n>b\nGG\n", TWO, "read, held in memory"),
        Row("Windows line ends", "a.fa", FA.replace(b"\n", b"\r\n"), TWO),
        Row("line ends of old Macs", "a.fa", FA.replace(b"\n", b"\r"), TWO),
        Row("a carriage return inside a record", "a.fa", b">a\nAC\rGT\nAC\n>b\nGG\n", TWO, "read, it is no base"),
        Row("blanks inside a record", "a.fa", b">a\nACG TAC\n>b\nG\tG \n", TWO, "read, they are no bases"),
        Row("no line end at the end", "a.fa", FA[:-1], TWO),
        Row("blank lines", "a.fa", b"\n>a\nACGT\n\nAC\n\n>b\nGG\n\n", TWO),
        Row("a byte-order mark", "a.fa", BOM + FA, TWO),
        Row("UTF-16", "a.fa", FA.decode().encode("utf-16"), TWO),
        Row("comments before the first record", "a.fa", b";a comment\n" + FA, TWO),
        Row("lower case, gaps, IUPAC codes", "a.fa", b">a\nacgtN-RYKM*\n", {"a": b"acgtN-RYKM*"},
            "read, each letter kept"),
        Row("a character of several bytes", "a.fa", ">a\nMK\u2013V\n".encode(), {"a": "MK\u2013V".encode()},
            "read, each byte kept"),
        Row("words behind a name", "a.fa", b">a b=1 c\nAC\n", {"a": b"AC"}, "read, the first word is the name"),
        Row("a name in UTF-8", "a.fa", ">caf\u00e9\nAC\n".encode(), {"caf\u00e9": b"AC"}),
        Row("a record without bases", "a.fa", b">a\n>b\nGG\n", {"a": b"", "b": b"GG"}, "read, with 0 bases"),
        Row("a name that occurs twice", "a.fa", b">a\nAC\n>a\nGG\n", Refused("FASTA record 'a' occurs twice")),
        Row("a '>' without a name", "a.fa", b">\nAC\n", Refused("has a header without a name")),
        Row("bases before the first name", "a.fa", b"AC\n>a\nGG\n", Refused("has text before its first '>' line")),
        Row("no record", "a.fa", b"; none\n", Refused("has no FASTA record: expected a line that starts with '>'")),
        Row("gzip", "a.fa.gz", gzip.compress(FA), TWO, "read, held in memory"),
        Row("gzip under a plain name", "a.fasta", gzip.compress(FA), TWO, "read, held in memory"),
        Row("bgzip", "a.fa.bgz", bgzip(FA), TWO, "read, held in memory"),
        Row("bgzip, broken off at a block", "a.fa.gz", bgzip(FA, end=False),
            Refused("is truncated: a bgzip file ends with")),
        Row("FASTQ", "a.fq", b"@r\nAC\n+\nII\n", FASTQ),
        Row("FASTQ of several lines", "a.fq", b"@r\r\nAC\r\nGT\r\n+\r\nII\r\nII\r\n", FASTQ),
        Row("FASTQ, qualities cut", "a.fq", b"@r\nACGT\n+\n>>\n", FASTQ),
        Row("2bit", "a.2bit", b"\x43\x27\x41\x1a\x00\x00",
            Refused("is a 2bit file, which is not read as text: write it as FASTA")),
        Row("BAM", "a.bam", bgzip(b"BAM\x01\x00"), Refused("holds, once decompressed, a BAM file")),
    ),
    "JSON lines": (
        Row("blank lines", "a.jsonl", LINES.replace(b"\n", b"\n\n \n"), TEXTS),
        Row("Windows line ends", "a.jsonl", LINES.replace(b"\n", b"\r\n"), TEXTS),
        Row("no line end at the end", "a.jsonl", LINES[:-1], TEXTS),
        Row("a byte-order mark", "a.jsonl", BOM + LINES, TEXTS),
        Row("UTF-16", "a.jsonl", LINES.decode().encode("utf-16"), TEXTS),
        Row("gzip", "a.jsonl.gz", gzip.compress(LINES), TEXTS, "read, held in memory"),
        Row("a line broken off", "a.jsonl", LINES[:-3], Refused("a.jsonl:2 is not JSON")),
        Row("Latin-1", "a.jsonl", b'{"text": "\xe9"}\n', Refused("a.jsonl:1 is not UTF-8: byte 0xe9 at column 10")),
        Row("a line without the field", "a.jsonl", b'{"body": "a"}\n',
            Refused("a.jsonl:1 has no field 'text'; its fields are")),
        Row("one array", "a.jsonl", b'[{"text": "a"}]\n', Refused("a.jsonl:1 holds a list; expected an object")),
        Row("blank lines alone", "a.jsonl", b"\n \n", Refused("holds blank lines alone: no JSON object")),
    ),
    "Tables": (
        Row("commas", "a.csv", CSV, LABELS),
        Row("tabs", "a.tsv", CSV.replace(b",", b"\t"), LABELS),
        Row("quoted cells", "a.csv", b'label,sequence\n"x","ACGT"\ny,GG\n', LABELS),
        Row("commas, quotes and lines in a cell", "a.csv", b'sequence,label\n"A,""\nC",x\n', [(b'A,"\nC', "x")]),
        Row("Windows line ends, blank lines", "a.csv", CSV.replace(b"\n", b"\r\n\r\n"), LABELS),
        Row("line ends of old Macs", "a.csv", CSV.replace(b"\n", b"\r"), LABELS),
        Row("a byte-order mark, as Excel writes", "a.csv", BOM + CSV, LABELS),
        Row("UTF-16, as Excel writes", "a.tsv", CSV.decode().replace(",", "\t").encode("utf-16"), LABELS),
        Row("no line end at the end", "a.csv", CSV[:-1], LABELS),
        Row("gzip, capital letters", "A.CSV.GZ", gzip.compress(CSV), LABELS),
        Row("a cell of 200,000 bytes", "a.csv", b"sequence,label\n" + b"ACGT" * 50_000 + b",x\n",
            [(b"ACGT" * 50_000, "x")]),
        Row("semicolons", "a.csv", CSV.replace(b",", b";"),
            Refused("has no column 'sequence', it has ['sequence;label']")),
        Row("tabs in a .csv", "a.csv", CSV.replace(b",", b"\t"),
            Refused("name the right one (--data.sequence COLUMN), with commas between cells")),
        Row("a row of too few cells", "a.csv", CSV + b"AC\n",
            Refused("a.csv:4 has 1 cells, expected 2: sequence, label; cells stand between commas in .csv and")),
        Row("a quote that stays open", "a.csv", CSV + b'"AC,x\n', Refused("a.csv:4 is no row of a table")),
        Row("Latin-1", "a.csv", CSV + b"AC,\xe9\n", Refused("is not UTF-8 (byte 30): re-encode it")),
        Row("an .xlsx called .csv", "a.csv", archive(zipped), Refused("is a zip archive (as .xlsx, .docx, .npz")),
        Row("labels in Parquet", "a.parquet", arrow(["A"], "parquet", "sequence"), Refused("has 0 columns 'label'")),
    ),
    "BED": (
        Row("3 columns", "a.bed", BED, PARTS),
        Row("12 columns", "a.bed", b"chr1\t0\t9\tn\t0\t+\t0\t9\t0\t1\t9,\t0,\n", PARTS[:1], "read, 6 columns of them"),
        Row("track and browser lines, comments", "a.bed", b"track name=x\nbrowser hide\n#c\n\n" + BED, PARTS),
        Row("blanks between columns", "a.bed", BED.replace(b"\t", b" "), PARTS),
        Row("Windows line ends", "a.bed", BED.replace(b"\n", b"\r\n"), PARTS),
        Row("line ends of old Macs", "a.bed", BED.replace(b"\n", b"\r"), PARTS),
        Row("a byte-order mark", "a.bed", BOM + BED, PARTS),
        Row("bgzip", "a.bed.bgz", bgzip(BED), PARTS),
        Row("2 columns", "a.bed", b"chr1\t0\n", Refused("a.bed:1 is no BED line")),
        Row("an interval without a base", "a.bed", b"chr1\t9\t9\n",
            Refused("holds no base; BED is 0-based and half-open")),
        Row("bigBed", "a.bb", b"\xeb\xf2\x89\x87\x04\x00", Refused("is a bigBed file")),
    ),
    "VCF": (
        *(Row(f"version {v}", "a.vcf", vcf(version=v), ["c1:5 A>G"]) for v in ("4.1", "4.2", "4.3", "4.4")),
        Row("no header", "a.vcf", ROW.encode(), ["c1:5 A>G"]),
        Row("5 columns", "a.vcf", b"c1\t5\t.\tA\tG\n", ["c1:5 A>G"]),
        Row("samples", "a.vcf", vcf().replace(b"INFO\n", b"INFO\tFORMAT\tS1\n"), ["c1:5 A>G"],
            "read, and carried to the output"),
        Row("several alternate alleles", "a.vcf", vcf("c1\t5\t.\tA\tG,AT\n"), ["c1:5 A>G", "c1:5 A>AT"],
            "read, one a row"),
        Row("Windows line ends", "a.vcf", vcf().replace(b"\n", b"\r\n"), ["c1:5 A>G"]),
        Row("line ends of old Macs", "a.vcf", vcf().replace(b"\n", b"\r"), ["c1:5 A>G"]),
        Row("a byte-order mark", "a.vcf", BOM + vcf(), ["c1:5 A>G"]),
        Row("no line end at the end", "a.vcf", vcf()[:-1], ["c1:5 A>G"]),
        Row("bgzip, as gnomAD has it", "a.vcf.bgz", bgzip(vcf()), ["c1:5 A>G"], "read, never held in memory"),
        Row("bgzip, broken off at a block", "a.vcf.gz", bgzip(vcf(), end=False),
            Refused("is truncated: a bgzip file ends with")),
        Row("a spanning deletion", "a.vcf", vcf("c1\t5\t.\tA\t*\n"),
            Refused("c1:5 A>*: spanning deletion (*), which has no score")),
        Row("no alternate allele", "a.vcf", vcf("c1\t5\t.\tA\t.\n"),
            Refused("no alternate allele (.), which has no score")),
        Row("gVCF of GATK", "a.vcf", vcf("c1\t5\t.\tA\t<NON_REF>\n"),
            Refused("any other allele (<NON_REF>, <*>), which has no")),
        Row("symbolic alleles", "a.vcf", vcf("c1\t5\t.\tA\t<DEL>\n"), Refused("symbolic allele, which has no score")),
        Row("breakends", "a.vcf", vcf("c1\t5\t.\tA\tA[c2:9[\n"), Refused("breakend, which has no score")),
        Row("IUPAC codes", "a.vcf", vcf("c1\t5\t.\tA\tR\n"),
            Refused("allele of other letters than ACGTN, which has no score")),
        Row("an alternate allele equal to the reference", "a.vcf", vcf("c1\t5\t.\ta\tA\n"),
            Refused("ALT equal to REF, which has")),
        Row("a header alone", "a.vcf", vcf(""), Refused("holds no variant: expected rows of CHROM, POS, ID, REF, ALT")),
        Row("blanks in place of tabs", "a.vcf", b"c1 5 . A G\n",
            Refused("expected at least 5 columns with tabs between")),
        Row("a position that is no number", "a.vcf", b"c1\tx\t.\tA\tG\n",
            Refused("POS must be a whole number from 0, got 'x'")),
        Row("BCF", "a.bcf", bgzip(b"BCF\x02\x02"), Refused("holds, once decompressed, a BCF file")),
    ),
    "Parquet and Arrow": (
        Row("Parquet of text", "a.parquet", arrow(["a", "\u00e9"], "parquet"), TEXTS, "read, held in memory"),
        Row("Parquet of bytes", "a.parquet", arrow([b"a", b"\xff"], "parquet"), [b"a", b"\xff"],
            "read, held in memory"),
        Row("an Arrow file", "a.arrow", arrow(["a", "\u00e9"]), TEXTS, "read where it lies"),
        Row("an Arrow stream", "a.arrow", arrow(["a", "\u00e9"], "stream"), TEXTS, "read where it lies"),
        Row("Feather", "a.feather", arrow(["a", "\u00e9"], "feather"), TEXTS),
        Row("an Arrow stream, broken off", "a.arrow", cut(arrow(["a"], "stream"), -8),
            Refused("is truncated: an Arrow stream")),
        Row("an Arrow file, broken off", "a.arrow", cut(arrow(["a"]), -8), Refused("a.arrow' is damaged")),
        Row("Parquet, broken off", "a.parquet", cut(arrow(["a"], "parquet"), -8), Refused("a.parquet' is damaged")),
        Row("a column of numbers", "a.arrow", arrow([1]),
            Refused("column 'text' holds int64, expected text, bytes or lists")),
        Row("an empty cell", "a.arrow", arrow(["a", None]), Refused("a.arrow:2: column 'text' holds nothing (null)")),
        Row("another column", "a.arrow", arrow(["a"], name="body"), Refused("has 0 columns 'text', it has ['body']")),
        Row("a table called .parquet", "a.parquet", CSV, Refused("is neither Parquet nor Arrow")),
    ),
}  # fmt: skip
CASES = [(kind, row) for kind, rows in TABLE.items() for row in rows]


def read_or_refuse(kind: str, row: Row, folder: Path) -> Any:
    """What a file is read as; of an error the line that it says."""
    path = folder / row.name
    path.write_bytes(row.data() if callable(row.data) else row.data)
    try:
        return READERS[kind](path)
    except (ValueError, OSError) as error:
        return str(error)


def agrees(row: Row, found: Any) -> bool:
    """Whether this is what the table says."""
    if isinstance(row.found, Refused):
        return isinstance(found, str) and row.found.words in found and row.name in found and "\n" not in found
    return found == row.found


@pytest.mark.parametrize(("kind", "row"), CASES, ids=[f"{kind}: {row.about}" for kind, row in CASES])
def test_each_file_is_read_or_refused(tmp_path, kind, row):
    found = read_or_refuse(kind, row, tmp_path)
    assert agrees(row, found), found


def read_as_nobody() -> None:
    """Reads the whole table without rights in a folder of its own, and prints what is not as it says."""
    arrow(["a"], "parquet")()  # what is imported later lies where nobody may look
    documents_of = arrow(["a"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.arrow").write_bytes(documents_of())
        READERS["Parquet and Arrow"](Path(folder) / "a.arrow")
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    wrong = []
    for kind, row in CASES:
        with tempfile.TemporaryDirectory() as folder:
            if not agrees(row, read_or_refuse(kind, row, Path(folder))):
                wrong.append(f"{kind}: {row.about}")
    print(len(CASES), ascii(wrong), os.geteuid())


@pytest.mark.slow(days=28, group="costly")
def test_another_locale_and_another_user_read_the_same():
    """Where neither the terminal nor the locale knows UTF-8, and nobody owns the library's files."""
    places = {"LC_ALL": "C", "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = f"from {__name__} import read_as_nobody; read_as_nobody()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=PAGE.parents[2],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
    )
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    assert done.stdout == f"{len(CASES)} [] {uid}\n", done.stderr


def generated() -> str:
    """The part of the page that the table makes."""
    lines = [HEADING, LEGEND]
    for kind, rows in TABLE.items():
        lines += [f"### {kind}\n", "| file | such as | jaxblt |", "|---|---|---|"]
        for row in rows:
            refused = isinstance(row.found, Refused)
            said = f'refuses it: "... {row.found.words} ..."' if refused else row.note
            lines.append(
                f"| {row.about} | `{row.name}` | {said.replace('|', chr(92) + '|').replace('<', '&lt;')} |"
            )
        lines.append("")
    return "\n".join(lines)


def test_the_page_shows_the_table():
    assert len(CASES) >= 60
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index(HEADING) :] == generated(), f"python -m {__name__} writes it anew"


if __name__ == "__main__":
    before, *_ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(before + generated(), encoding="utf-8")
