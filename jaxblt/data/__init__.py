"""Bytes to batches: sources of documents, splits, rows of bytes, datasets, embedded samples."""

from jaxblt.data.batch import Batch
from jaxblt.data.buckets import bucket
from jaxblt.data.config import DataConfig, KindWarning, apply_split, open_source
from jaxblt.data.dataset import Dataset
from jaxblt.data.draws import Draws
from jaxblt.data.entropies import Entropies, read_entropies, source_hash, write_entropies
from jaxblt.data.examples import Example, Examples, TaskSource, question_and_answer
from jaxblt.data.iterator import BatchIterator
from jaxblt.data.kmers import KmerVocab
from jaxblt.data.label_tasks import LabelTask
from jaxblt.data.labelled import LabelledDataConfig, LabelledDataset, with_classes
from jaxblt.data.leaks import NearCopyWarning
from jaxblt.data.mixture import SourceConfig
from jaxblt.data.packing import PackedIndex, pack
from jaxblt.data.permutation import hash64, permute
from jaxblt.data.pipeline import DocumentDataset, make_dataset
from jaxblt.data.samples import SAMPLES, load_sample, sample_source
from jaxblt.data.sources import (
    ArrowSource,
    BedInterval,
    BedSource,
    BytesSource,
    ChangedFileWarning,
    DocumentSource,
    EmptyFileWarning,
    FastaSource,
    JsonlSource,
    Regions,
    ReverseComplement,
    TextSource,
    fetch,
    open_bed,
    open_regions,
    parse_fasta,
    read_bed,
    read_document,
    read_regions,
    reverse_complement,
    whole,
)
from jaxblt.data.splits import split_by_document, split_by_name, split_by_position
from jaxblt.data.task_data import RowsConfig, TaskDataConfig, TaskDataset
from jaxblt.data.vocab import BOE, BOS, EOS, OFFSET, PAD, VOCAB_SIZE, decode, encode
from jaxblt.data.windows import WindowIndex

__all__ = [
    "BOE",
    "BOS",
    "EOS",
    "OFFSET",
    "PAD",
    "SAMPLES",
    "VOCAB_SIZE",
    "ArrowSource",
    "Batch",
    "BatchIterator",
    "BedInterval",
    "BedSource",
    "BytesSource",
    "ChangedFileWarning",
    "DataConfig",
    "Dataset",
    "DocumentDataset",
    "DocumentSource",
    "Draws",
    "EmptyFileWarning",
    "Entropies",
    "Example",
    "Examples",
    "FastaSource",
    "JsonlSource",
    "KindWarning",
    "KmerVocab",
    "LabelTask",
    "LabelledDataConfig",
    "LabelledDataset",
    "NearCopyWarning",
    "PackedIndex",
    "Regions",
    "ReverseComplement",
    "RowsConfig",
    "SourceConfig",
    "TaskDataConfig",
    "TaskDataset",
    "TaskSource",
    "TextSource",
    "WindowIndex",
    "apply_split",
    "bucket",
    "decode",
    "encode",
    "fetch",
    "hash64",
    "load_sample",
    "make_dataset",
    "open_bed",
    "open_regions",
    "open_source",
    "pack",
    "parse_fasta",
    "permute",
    "question_and_answer",
    "read_bed",
    "read_document",
    "read_entropies",
    "read_regions",
    "reverse_complement",
    "sample_source",
    "source_hash",
    "split_by_document",
    "split_by_name",
    "split_by_position",
    "whole",
    "with_classes",
    "write_entropies",
]
