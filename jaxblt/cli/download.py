"""Download a file, check it, and only then give it its name.

Contents are streamed to a temporary name beside the file. What is there already is checked and never overwritten.
"""

import hashlib
import http.client
import lzma
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from jaxblt.cli.catalogue import Download
from jaxblt.outputs import write_text

CHUNK = 1 << 20
TIMEOUT_S = 60
MOST_BYTES = 1 << 30
"""The most bytes of a file whose size is not known."""
COLUMNS = 60
LOCK = "checksums.lock"


class Unreachable(OSError):
    """An address that cannot be reached, or does not answer with the file."""


def obtain(file: Download, folder: Path) -> bool:
    """Make a file of a data set if it is not there; return True if it was downloaded.

    Raises:
      Unreachable: of its address.
      ValueError: what is there, or what came, has another checksum.
    """
    target = folder / file.path
    expected = file.sha256 or locked(folder).get(file.path)
    if target.exists():
        found = digest(target)
        if expected is None:
            lock(folder, file.path, found)
        elif found != expected:
            raise ValueError(
                f"{target} has SHA-256 {found}, expected {expected}: move it away, and fetch again"
            )
        return False
    partial = target.with_name(f"{target.name}.partial{os.getpid()}")
    try:
        found = _download(file, partial, compress=target.suffix == ".xz")
        if expected is not None and found != expected:
            raise ValueError(
                f"{file.url} has SHA-256 {found}, expected {expected}: it is another file now, or was damaged on its "
                "way; nothing was kept, try again"
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    if expected is None:
        lock(folder, file.path, found)
    return True


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's contents, in hex; of an .xz file, of what it unpacks to.

    Raises:
      ValueError: an .xz file is damaged.
    """
    found = hashlib.sha256()
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            while part := stream.read(CHUNK):
                found.update(part)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}): move it away, and fetch again") from error
    return found.hexdigest()


def locked(folder: Path) -> dict[str, str]:
    """Read the checksums by path that earlier downloads recorded in a folder.

    They have the form of `sha256sum`.
    """
    file = folder / LOCK
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    pairs = [line.split("  ", 1) for line in lines if "  " in line]
    return {path: checksum for checksum, path in pairs}


def lock(folder: Path, path: str, checksum: str) -> None:
    """Record the checksum of a file that had none, and say so."""
    known = locked(folder) | {path: checksum}
    write_text(folder / LOCK, "".join(f"{value}  {name}\n" for name, value in known.items()))
    print(f"no checksum of {path} was known: it has SHA-256 {checksum}, recorded in {folder / LOCK}")


def _download(file: Download, path: Path, *, compress: bool) -> str:
    """Write the contents to `path`, and return their SHA-256 in hex."""
    found = hashlib.sha256()
    most = MOST_BYTES if file.size is None else 2 * file.size
    request = urllib.request.Request(file.url, headers={"User-Agent": "jaxblt"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            path.parent.mkdir(parents=True, exist_ok=True)
            with lzma.open(path, "wb") if compress else path.open("wb") as out:
                for part in _contents(answer, file, most):
                    found.update(part)
                    out.write(part)
    except urllib.error.HTTPError as error:
        error.close()
        raise Unreachable(f"{urlsplit(file.url).hostname} does not answer with the file ({error})") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unreachable(f"{urlsplit(file.url).hostname} does not answer ({reason})") from error
    return found.hexdigest()


def _contents(answer: BinaryIO, file: Download, most: int) -> Iterator[bytes]:
    chunks = _bounded(answer, file.url, most)
    return chunks if file.header is None else rewrapped(chunks, file.header)


def _bounded(answer: BinaryIO, url: str, most: int) -> Iterator[bytes]:
    size = 0
    while part := answer.read(CHUNK):
        size += len(part)
        if size > most:
            raise ValueError(f"{url} has more than {most:,} bytes: it is no longer the file that is meant")
        yield part


def rewrapped(chunks: Iterator[bytes], header: str) -> Iterator[bytes]:
    """Yield a FASTA record with another first line, in lines of `COLUMNS` letters."""
    yield header.encode() + b"\n"
    head, found, left = b"", False, b""
    for chunk in chunks:
        if not found:
            head, newline, chunk = (head + chunk).partition(b"\n")
            found = bool(newline)
        left += b"".join(chunk.split())
        whole = len(left) // COLUMNS * COLUMNS
        yield b"".join(left[i : i + COLUMNS] + b"\n" for i in range(0, whole, COLUMNS))
        left = left[whole:]
    if left:
        yield left + b"\n"
