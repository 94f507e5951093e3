"""One object store or web server after another behind five functions: find, describe, open, upload, remove."""

import contextlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxblt.remote.urls import scheme_of

OBJECT_STORES = ("s3", "gs")
WEB = ("http", "https")
TIMEOUT_S = 60
BLOCK = 1 << 23
"""Bytes that are copied at once."""
VERSIONS = (
    "e_tag",
    "ETag",
    "etag",
    "xet_hash",
    "blob_id",
    "last_modified",
    "LastModified",
    "mtime",
    "created",
)
"""The names that file systems have for what changes with a file's bytes."""


class RemoteFile(NamedTuple):
    """A file elsewhere: its address, bytes (None where nothing tells), and what changes when its bytes do."""

    url: str
    size: int | None
    version: str


def _filesystem(url: str) -> Any:
    scheme = scheme_of(url)
    try:
        if scheme in OBJECT_STORES:
            return _object_store(scheme)
        if scheme == "hf":
            from huggingface_hub import HfFileSystem  # pyright: ignore[reportMissingImports]

            return HfFileSystem()
        import fsspec

        # Let fsspec make it of the URL: some file systems are made for one host, and begin to connect meanwhile
        return fsspec.url_to_fs(url)[0]
    except ImportError as error:
        raise ImportError(
            f"{url} needs a package that is missing ({error}): pip install 'jaxblt[remote]', or copy the files here"
        ) from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}; expected s3://, gs://, hf:// or https://") from error


def _object_store(scheme: str) -> Any:
    from obstore.fsspec import FsspecStore

    # Annotate as Any: fsspec's metaclass makes it, whose arguments no signature tells.
    make: Any = FsspecStore
    # Expect https, except of endpoints that the environment names. Take no instance from fsspec's cache: the
    # environment may name another endpoint by now.
    return make(scheme, client_options={"allow_http": True}, skip_instance_cache=True)


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn errors of many libraries into one line that names the URL."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url} does not exist") from error
    except (ImportError, ValueError, IsADirectoryError):
        raise
    except urllib.error.HTTPError as error:
        error.close()
        kind = FileNotFoundError if error.code in (404, 410) else OSError
        raise kind(f"{url} cannot be read: {error.code} {error.reason}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        fix = "check the address, and the credentials in the environment (docs/guides/remote.md)"
        raise OSError(f"{url} cannot be reached, {fix}: {type(error).__name__}, {reason}") from error


def list_files(url: str) -> dict[str, RemoteFile]:
    """List the files in a folder and below it, by name relative to it; none if it is missing.

    Raises:
      ValueError: a web server lists no files, or nothing knows the scheme.
      ImportError: a package is missing.
      OSError: the store cannot be reached.
    """
    if scheme_of(url) in WEB:
        raise ValueError(f"{url} cannot be listed: name a folder of s3://, gs:// or hf://, or one file")
    with _told(url):
        root = url.partition("://")[2].strip("/") + "/"
        with contextlib.suppress(FileNotFoundError):
            found = _filesystem(url).find(url, detail=True)
            named = {name.strip("/"): info for name, info in found.items()}
            return {
                name.removeprefix(root): _described(f"{url}/{name.removeprefix(root)}", info)
                for name, info in named.items()
                if name.startswith(root)
            }
    return {}


def _described(url: str, info: dict[str, Any]) -> RemoteFile:
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), "")
    return RemoteFile(url, info.get("size"), version)


def matching(pattern: str) -> list[str]:
    """Return the URLs that a glob names, sorted."""
    scheme, _, path = pattern.partition("://")
    with _told(pattern):
        # Leave out the scheme, which obstore's file system takes for the name of a bucket here.
        found = _filesystem(pattern).glob(path)
        return sorted(f"{scheme}://{name.lstrip('/')}" for name in found)


@contextlib.contextmanager
def opened(url: str) -> Iterator[tuple[RemoteFile, Any]]:
    """Open a file for reading from its beginning; also yields what is known of it.

    Raises:
      FileNotFoundError: it is not there.
      ImportError, ValueError, OSError: as of `list_files`.
    """
    with _told(url), contextlib.ExitStack() as closed:
        if scheme_of(url) in WEB:
            request = urllib.request.Request(url, headers={"User-Agent": "jaxblt"})
            answer = closed.enter_context(urllib.request.urlopen(request, timeout=TIMEOUT_S))
            size = answer.headers.get("Content-Length")
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            described, stream = RemoteFile(url, None if size is None else int(size), version), answer
        else:
            files = _filesystem(url)
            info = files.info(url)
            if info["type"] == "directory":
                raise IsADirectoryError(f"{url} is a folder: name its files, such as {url}/*.txt")
            described, stream = _described(url, info), closed.enter_context(files.open(url, "rb"))
        yield described, stream


def download(url: str, target: Path) -> None:
    """Copy a file here; it appears under its name once it is whole."""
    with opened(url) as (file, stream):
        save(stream, target, size=file.size)


def save(stream: Any, target: Path, *, size: int | None) -> None:
    """Write what a stream holds, whole or not at all.

    Raises:
      OSError: it ends before `size` bytes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            shutil.copyfileobj(stream, out, BLOCK)
        found = partial.stat().st_size
        if size is not None and found != size:
            raise OSError(f"{found} of {size} bytes arrived: try again")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def upload(file: Path, url: str) -> None:
    """Copy a local file to a URL; object stores show it once it is whole.

    Raises:
      FileNotFoundError: the local file does not exist.
      ImportError, ValueError, OSError: as of `list_files`.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    with _told(url):
        _filesystem(url).put_file(str(file), url)


def remove(url: str) -> None:
    """Remove a file; nothing happens where it is gone already."""
    with contextlib.suppress(FileNotFoundError), _told(url):
        _filesystem(url).rm_file(url)
