"""FASTA that is in memory: records of bytes."""

BLANKS = b" \t\n\r\v\f"
"""Bytes that are no bases wherever they stand."""


def parse_fasta(data: bytes, name: str) -> list[tuple[str, bytes]]:
    r"""Return the records of a FASTA file that is in memory: (first word of the header, bases).

    Lines end with \n, \r\n or \r. Line ends and blanks are dropped, every other byte is kept.

    Args:
      data: the file's bytes.
      name: what to call the file in errors.

    Raises:
      ValueError: no record; bases before the first header; a header without a name.
    """
    records = records_of(data, name)
    if not records:
        raise no_record(name)
    return records


def records_of(data: bytes, name: str) -> list[tuple[str, bytes]]:
    """Return the records of a part of a file, which may be none; see `parse_fasta`."""
    head, *blocks = (b"\n" + unify_lines(data)).split(b"\n>")
    for line in map(bytes.strip, head.splitlines()):
        if line.startswith(b"@"):
            raise ValueError(
                f"{name!r} has a line that starts with '@' before its first '>' line, as FASTQ has: write it as FASTA, "
                "for example with seqtk seq -a"
            )
        if line and not line.startswith(b";"):
            fix = "is it a FASTA file?"
            if line.startswith((b"LOCUS ", b"ID  ")):
                fix = "it begins as GenBank or EMBL does, so write it as FASTA, for example with seqret"
            raise ValueError(f"{name!r} has text before its first '>' line: {fix}")
    return [_parse_record(block, name) for block in blocks]


def no_record(name: str) -> ValueError:
    """Return the error of a file without a record."""
    return ValueError(f"{name!r} has no FASTA record: expected a line that starts with '>'")


def record_name(header: bytes, name: str) -> str:
    """Return the first word of a header, which follows its '>'."""
    words = header.decode("utf-8", "replace").split()
    if not words:
        raise ValueError(
            f"{name!r} has a header without a name: {b'>' + header.strip()!r}; write one behind the '>'"
        )
    return words[0]


def unify_lines(data: bytes) -> bytes:
    r"""Convert line ends \n, \r\n and \r (of old Macs) to \n."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def _parse_record(block: bytes, name: str) -> tuple[str, bytes]:
    header, _, lines = block.partition(b"\n")
    return record_name(header, name), lines.translate(None, BLANKS)
