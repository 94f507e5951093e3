"""Documents of bytes: files, JSON lines, FASTA records, BED intervals, columns of Arrow, and views of them."""

from jaxblt.data.sources.arrow import ArrowSource
from jaxblt.data.sources.base import BytesSource, DocumentSource, document_ends, read_document
from jaxblt.data.sources.bed import BedInterval, BedSource, open_bed, read_bed
from jaxblt.data.sources.fasta import FastaSource, fetch
from jaxblt.data.sources.fasta_text import parse_fasta
from jaxblt.data.sources.files import EmptyFileWarning
from jaxblt.data.sources.gff import open_regions, read_regions
from jaxblt.data.sources.jsonl import JsonlSource
from jaxblt.data.sources.regions import Regions, whole
from jaxblt.data.sources.reverse import ReverseComplement, reverse_complement
from jaxblt.data.sources.text import TextSource
from jaxblt.data.sources.unchanged import ChangedFileWarning

__all__ = [
    "ArrowSource",
    "BedInterval",
    "BedSource",
    "BytesSource",
    "ChangedFileWarning",
    "DocumentSource",
    "EmptyFileWarning",
    "FastaSource",
    "JsonlSource",
    "Regions",
    "ReverseComplement",
    "TextSource",
    "document_ends",
    "fetch",
    "open_bed",
    "open_regions",
    "parse_fasta",
    "read_bed",
    "read_document",
    "read_regions",
    "reverse_complement",
    "whole",
]
