"""Small real data inside the package, with its origins and licences in samples/NOTICE.txt."""

import json
import lzma
from importlib import resources
from typing import Literal, NamedTuple

from jaxblt.data.sources import BytesSource, parse_fasta


class Sample(NamedTuple):
    """An embedded sample: its file, how it is read, and what it is."""

    file: str
    kind: Literal["text", "jsonl", "fasta"]
    about: str


SAMPLES = {
    "book": Sample(
        "time_machine.txt.xz", "text", "The Time Machine, H. G. Wells, 1895: one English document"
    ),
    "udhr": Sample(
        "udhr.jsonl.xz", "jsonl", "Universal Declaration of Human Rights: a document for each script"
    ),
    "lambda": Sample(
        "lambda_phage.fa.xz", "fasta", "Phage lambda genome NC_001416.1, 48,502 bases: one document"
    ),
}
"""Samples that the package carries, by name."""


def sample_source(name: str) -> BytesSource:
    """Open the documents of a sample: "book", "udhr" or "lambda".

    Raises:
      ValueError: there is no such sample.
    """
    if name not in SAMPLES:
        raise ValueError(f"unknown sample {name!r}: choose one of {', '.join(map(repr, SAMPLES))}")
    file, kind, _ = SAMPLES[name]
    data = lzma.decompress((resources.files("jaxblt.data") / "samples" / file).read_bytes())
    if kind == "fasta":
        records = parse_fasta(data, file)
    elif kind == "jsonl":
        lines = [json.loads(line) for line in data.decode("utf-8").split("\n") if line]
        records = [(line["language"], line["text"].encode("utf-8")) for line in lines]
    else:
        records = [(file.removesuffix(".xz"), data)]
    return BytesSource([bases for _, bases in records], [label for label, _ in records])


def load_sample(name: str) -> bytes:
    """Read all bytes of a sample, its documents one after another.

    A genome comes without headers and line ends.

    Raises:
      ValueError: there is no such sample.
    """
    return b"".join(sample_source(name).documents)
