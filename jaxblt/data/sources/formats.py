"""Binary formats, known by the bytes that their files begin with, and what to do with each."""

import codecs
import contextlib
import re
from typing import NamedTuple

HEAD = 512
"""Bytes at the start of a file that tell its format."""

COMPRESSIONS = {
    "gzip": rb"\x1f\x8b\x08",
    "xz": rb"\xfd7zXZ\x00",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
}
"""Patterns of the first bytes of files that are decompressed while they are read."""


class Format(NamedTuple):
    """A format that is not read as text.

    Attributes:
      name: of the format, with its article.
      pattern: of the bytes that its files begin with.
      fix: what to do with such a file.
    """

    name: str
    pattern: bytes
    fix: str


_UNPACK = "unpack it, and name the files in it"
_EXPORT = "export its text to a .csv, .tsv or .jsonl file"
ARROW_FIX = "read it with data.kind='arrow', and set data.field to its column of text"
AS_BYTES = "data.kind='bytes' reads files as they lie"

FORMATS = (
    Format("a Parquet file", rb"PAR1\x15", ARROW_FIX),
    Format("an Arrow file", rb"ARROW1\x00\x00", ARROW_FIX),
    Format("an Arrow stream", rb"\xff{4}..[\x00-\x0f]\x00[\x0c\x10\x14\x18]\x00{3}", ARROW_FIX),
    Format("a Feather file of version 1", rb"FEA1", "write it as Feather 2 or Parquet"),
    Format("an encrypted Parquet file", rb"PARE", "decrypt it"),
    Format("an ORC file", rb"ORC[\x00-\x08\x0e-\x1f\x80-\xff]", "write it as Parquet"),
    Format("an Avro file", rb"Obj\x01", "write it as Parquet"),
    Format("a zstd file", rb"\x28\xb5\x2f\xfd", "decompress it with zstd -d"),
    Format("an lz4 file", rb"\x04\x22\x4d\x18", "decompress it with lz4 -d"),
    Format(
        "a zip archive (as .xlsx, .docx, .npz and checkpoints of PyTorch are)",
        rb"PK(\x03\x04|\x05\x06)",
        _UNPACK,
    ),
    Format(
        "an lzma file",
        rb"\x5d\x00\x00[\x00-\xff]{2}([\x00-\xff]{5}\x00{3}|\xff{8})",
        "decompress it with xz -d",
    ),
    Format("an lzip file", rb"LZIP\x01", "decompress it with lzip -d"),
    Format("a file of compress (.Z)", rb"\x1f\x9d", "decompress it with gzip -d"),
    Format("a 7z archive", rb"7z\xbc\xaf\x27\x1c", _UNPACK),
    Format("a rar archive", rb"Rar!\x1a\x07", _UNPACK),
    Format("a tar archive", rb".{257}ustar", _UNPACK),
    Format("an HDF5 file (as .h5, .h5ad and .fast5 are)", rb"\x89HDF\r\n\x1a\n", _EXPORT),
    Format("a SQLite database", rb"SQLite format 3\x00", _EXPORT),
    Format("a MATLAB file", rb"MATLAB 5\.0 MAT-file", _EXPORT),
    Format("a file of R", rb"(RDX[23]\n)?[XAB]\n\x00\x00\x00[\x02\x03]", _EXPORT),
    Format("an old file of Office (.xls, .doc)", rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _EXPORT),
    Format("a PDF", rb"%PDF-\d", "extract its text with pdftotext"),
    Format("a NumPy array", rb"\x93NUMPY", _EXPORT),
    Format("a pickle", rb"\x80[\x02-\x05][\x95}\](cXK]", _EXPORT),
    Format("a safetensors file", rb"[^\x00].{1,3}\x00{4,6}\{\"", "name a file of text"),
    Format("a GGUF file", rb"GGUF[\x01-\x09]\x00{3}", "name a file of text"),
    Format("a BAM file", rb"BAM\x01", "write its reads as FASTA with samtools fasta"),
    Format("a CRAM file", rb"CRAM[\x01-\x09][\x00-\x1f]", "write its reads as FASTA with samtools fasta"),
    Format("a BCF file", rb"BCF[\x02\x04]", "write it as VCF with bcftools view"),
    Format("an index (.tbi, .csi, .bai)", rb"(TBI|CSI|BAI)\x01", "name the file that it is an index of"),
    Format("a 2bit file", rb"\x43\x27\x41\x1a|\x1a\x41\x27\x43", "write it as FASTA with twoBitToFa"),
    Format("a bigWig file", rb"\x26\xfc\x8f\x88|\x88\x8f\xfc\x26", "write it as text with bigWigToBedGraph"),
    Format("a bigBed file", rb"\xeb\xf2\x89\x87|\x87\x89\xf2\xeb", "write it as BED with bigBedToBed"),
    Format("an SRA archive", rb"NCBI\.sra", "write its reads as FASTA with fasterq-dump --fasta"),
    Format("a trace of a sequencer (.ab1)", rb"ABIF[\x00\x01]", "write it as FASTA"),
    Format("a file of reads (.sff)", rb"\.sff\x00\x00\x00\x01", "write its reads as FASTA"),
    Format("a file of signals (.pod5)", rb"\x8bPOD\r\n\x1a\n", "call its bases, and write them as FASTA"),
    Format("a program (ELF)", rb"\x7fELF", AS_BYTES),
    Format("a program (PE)", rb"MZ[\x00-\xff]\x00\x03\x00", AS_BYTES),
    Format("a program (Mach-O)", rb"[\xcf\xce]\xfa\xed\xfe|\xca\xfe\xba\xbe\x00", AS_BYTES),
    Format("a PNG image", rb"\x89PNG\r\n\x1a\n", AS_BYTES),
    Format("a JPEG image", rb"\xff\xd8\xff", AS_BYTES),
    Format("a GIF image", rb"GIF8[79]a", AS_BYTES),
    Format("a TIFF image", rb"II\*\x00|MM\x00\*", AS_BYTES),
    Format("a RIFF file (sound or pictures)", rb"RIFF.{4}(WAVE|WEBP|AVI )", AS_BYTES),
    Format("sound or video", rb"ID3[\x02-\x04]\x00|OggS\x00|fLaC\x00|.{4}ftyp", AS_BYTES),
    Format("a pointer of Git LFS", rb"version https://git-lfs\.github\.com/spec/", "run git lfs pull"),
)
"""The formats that are refused in place of text."""

MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
"""Byte-order marks, and the encodings that they stand for."""


def compression_of(head: bytes) -> str | None:
    """Return the name of the compression whose files begin with `head`, or None."""
    return next((name for name, pattern in COMPRESSIONS.items() if re.match(pattern, head)), None)


def format_of(head: bytes) -> Format | None:
    """Return the binary format whose files begin with `head`, or None."""
    return next((kind for kind in FORMATS if re.match(kind.pattern, head, re.DOTALL)), None)


def mark_of(head: bytes) -> tuple[bytes, str]:
    """Return the byte-order mark at the start of `head` and its encoding.

    Without a mark: b"" and UTF-8.
    """
    return next(((mark, encoding) for mark, encoding in MARKS if head.startswith(mark)), (b"", "utf-8"))


def wide_encoding_of(head: bytes) -> str | None:
    """Return the encoding of a text without a mark whose letters take two or four bytes each, or None.

    In UTF-16, zeros are only at every second byte, and at half of these or more if most letters are Latin. A text of
    fewer than eight letters has them at all of these: another file may begin with a few by chance. Text in UTF-8 is no
    UTF-32: its numbers are too large.
    """
    whole = head[: len(head) // 4 * 4]
    # Call the decoders: looking them up by name imports a file, which not every user may read
    for encoding, decode in (("UTF-32LE", codecs.utf_32_le_decode), ("UTF-32BE", codecs.utf_32_be_decode)):
        with contextlib.suppress(UnicodeError):
            if len(whole) >= 8 and "\0" not in decode(whole)[0]:
                return encoding
    low, high = head[: len(head) // 2 * 2 : 2], head[1::2]
    for encoding, letters, zeros in (("UTF-16LE", low, high), ("UTF-16BE", high, low)):
        least = max(len(zeros) / 2, min(len(zeros), 8))
        if len(head) >= 4 and all(letters) and zeros.count(0) >= least:
            return encoding
    return None
