"""Opens files of text as people have them: compressed, with a byte-order mark, in UTF-16.

A file that begins like a binary format is refused, and the error names the format. Readers of text, FASTA, BED, VCF,
JSON lines and tables open their files here, so that all take the same files.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxblt.data.sources.formats import HEAD, compression_of, format_of, mark_of, wide_encoding_of

COMPRESSED = (".gz", ".bgz", ".xz", ".bz2")
"""Names of compressed files end so, in any case of letters."""
FREE = 1 << 28
"""Bytes that every compressed file may hold."""
EXPANSION = 100
"""Times its own bytes that a compressed file may hold, unless `JAXBLT_EXPANSION` says otherwise."""
MOST_LINE = 1 << 28
"""Characters of a line of a file that is read line by line."""

_CHUNK = 1 << 20
_DAMAGED = (lzma.LZMAError, zlib.error, EOFError, OSError)
_OPEN: dict[str, Callable[..., Any]] = {"gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}
_END_BLOCK = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


def name_of(path: Path) -> str:
    """Return what a file is called: its path, or the URL or pipe of which it is a copy."""
    return getattr(path, "url", "") or str(path)


def is_compressed_name(path: Path) -> bool:
    """Return whether a file's name ends as those of compressed files do."""
    return path.suffix.lower() in COMPRESSED


def empty(path: Path) -> ValueError:
    """Return the error of a file without a byte."""
    return ValueError(
        f"{name_of(path)!r} is empty (0 bytes): remove it from the paths, or check how it was written"
    )


def is_empty(path: Path) -> bool:
    """Return whether a file holds no byte of text.

    It is empty, has only a byte-order mark, or is one of these compressed.
    """
    if path.stat().st_size > HEAD:
        return False
    head = _head(path)
    if compression := compression_of(head):
        with contextlib.suppress(*_DAMAGED), _OPEN[compression](path, "rb") as file:
            head = file.read(HEAD)
    return not head.removeprefix(mark_of(head)[0])


def plain_start(path: Path) -> int | None:
    """Return the byte where the text of a file begins, or None if it is not read in place.

    A compressed file and UTF-16 cannot; `read_all` makes text of them.

    Raises:
      ValueError: the file is empty, or of a binary format.
    """
    head = _head(path)
    if compression_of(head) or is_compressed_name(path):
        return None
    mark, encoding = _checked_mark(path, head, "is")
    return len(mark) if encoding == "utf-8" else None


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file as a stream of UTF-8 text, decompressed, without a byte-order mark.

    Line ends stay as they are. Bytes that are not UTF-8 pass unchanged, unless the file's mark says that it is UTF-16
    or UTF-32.

    Raises:
      ValueError: the file is empty, damaged, truncated, or of a binary format.
    """
    head = _head(path)
    compression = compression_of(head)
    if compression is None and head and is_compressed_name(path):
        _refuse(path, head, "is")
        raise ValueError(
            f"{name_of(path)!r} is damaged or not a {path.suffix} file (it begins with {head[:16]!r}): copy it again, "
            "or rename it if it is not compressed"
        )
    if compression == "gzip":
        _check_end_block(path, head)
    with _told_as_damaged(path, compression), _OPEN.get(compression or "", open)(path, "rb") as file:
        inner = file.read(HEAD)
        mark, encoding = _checked_mark(path, inner, "holds, once decompressed," if compression else "is")
        file.seek(len(mark))
        yield file if encoding == "utf-8" else io.BytesIO(_recoded(path, file, encoding))


def read_all(path: Path) -> bytes:
    """Return every byte of a file's text, see `open_text`.

    Raises:
      ValueError: as of `open_text`, or a compressed file holds far more than its size (see `check_expansion`).
    """
    with open_text(path) as file:
        return _held(path, file)


def read_lines(path: Path) -> Iterator[str]:
    r"""Return the lines of a file one after the other, without their ends: \n, \r\n or \r.

    They are never held together. Bytes that are not UTF-8 become U+FFFD.

    Raises:
      ValueError: as of `open_text`, or a line has more than `MOST_LINE` characters.
    """
    with open_text(path) as file:
        stream: Any = file
        lines = io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline=None)
        while line := lines.readline(MOST_LINE):
            if len(line) == MOST_LINE:
                raise ValueError(
                    f"{name_of(path)!r} has a line of {MOST_LINE:,} characters or more: is it a file of lines?"
                )
            yield line.removesuffix("\n")


def check_expansion(path: Path, held: int) -> None:
    """Check that a compressed file is no bomb, which holds far more than its size tells.

    Raises:
      ValueError: it holds more than `FREE` bytes, and more than `EXPANSION` times its size or a quarter of the memory.
    """
    size = path.stat().st_size
    most = max(FREE, size, min(_expansion() * size, _memory() // 4))
    if held > most:
        raise ValueError(
            f"{name_of(path)!r} of {size:,} bytes holds more than {most:,} once decompressed ({_expansion()} times its "
            "size, or a quarter of the memory): if you trust it, decompress it to a file, or set JAXBLT_EXPANSION to "
            "how many times its size it may hold"
        )


def _memory() -> int:
    """Return the bytes of memory of this machine, or of the container that the process runs in."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def _expansion() -> int:
    said = os.environ.get("JAXBLT_EXPANSION", str(EXPANSION))
    if not (said.isascii() and said.isdigit()):
        raise ValueError(
            f"JAXBLT_EXPANSION must be a whole number, got {said!r}: how many times its size a file may hold"
        )
    return int(said)


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEAD)


def _checked_mark(path: Path, head: bytes, verb: str) -> tuple[bytes, str]:
    """Return the mark and encoding of a text that begins with `head`.

    Raises ValueError if it is no text.
    """
    mark, encoding = mark_of(head)
    if head == mark:
        raise empty(path)
    _refuse(path, head, verb)
    if compression := compression_of(head):
        raise ValueError(f"{name_of(path)!r} is compressed twice ({compression}): decompress it once")
    if not mark and (wide := wide_encoding_of(head)):
        raise ValueError(
            f"{name_of(path)!r} {verb} {wide[:6]} without a byte-order mark: re-encode it with iconv -f {wide} -t UTF-8"
        )
    return mark, encoding


def _refuse(path: Path, head: bytes, verb: str) -> None:
    if (kind := format_of(head)) is not None:
        raise ValueError(f"{name_of(path)!r} {verb} {kind.name}, which is not read as text: {kind.fix}")


def _check_end_block(path: Path, head: bytes) -> None:
    """Raise ValueError for a bgzip file without its last block: its download broke off."""
    if not _has_block_sizes(head):
        return
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - len(_END_BLOCK), 0))
        if file.read() == _END_BLOCK:
            return
    raise ValueError(
        f"{name_of(path)!r} is truncated: a bgzip file ends with an empty block, and this one has none; copy it again, "
        "or, if you know that it is whole, compress it anew"
    )


def _has_block_sizes(head: bytes) -> bool:
    """Return whether a gzip file's first member has the extra field BC, as bgzip writes it."""
    fields = head[12 : 12 + int.from_bytes(head[10:12], "little")] if head[3:4] and head[3] & 4 else b""
    while len(fields) >= 4:
        if fields.startswith(b"BC\x02\x00"):
            return True
        fields = fields[4 + int.from_bytes(fields[2:4], "little") :]
    return False


@contextlib.contextmanager
def _told_as_damaged(path: Path, compression: str | None) -> Iterator[None]:
    """Name the file in the errors of decompressors, which name none and lack a number."""
    try:
        yield
    except _DAMAGED as error:
        if isinstance(error, OSError) and (error.errno is not None or compression is None):
            raise
        raise ValueError(
            f"{name_of(path)!r} is damaged or not a whole {compression} file ({error}): copy it again"
        ) from error


def _held(path: Path, file: io.BufferedIOBase) -> bytes:
    parts, held = [], 0
    while part := file.read(_CHUNK):
        parts.append(part)
        held += len(part)
        check_expansion(path, held)
    return b"".join(parts)


def _recoded(path: Path, file: io.BufferedIOBase, encoding: str) -> bytes:
    file.seek(0)
    try:
        return _held(path, file).decode(encoding).encode()
    except UnicodeError as error:
        raise ValueError(
            f"{name_of(path)!r} begins with the mark of {encoding.upper()} and is none ({error}): re-encode it as UTF-8"
        ) from error
