"""Checkpoints of torch (`.pt`, zip archives) without torch: tensors by name, read one by one and never all at once.

A file may lie in parts, NAME.part0, NAME.part1 and so on, as large ones are published.
"""

import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxblt.interchange.torch_pickle import Storage, Tensor, read_state, write_state
from jaxblt.outputs import whole_file
from jaxblt.training.stored.safe_files import one_line

KINDS = {"Float": np.float32, "BFloat16": jnp.bfloat16, "Half": np.float16, "Double": np.float64}
"""Dtypes that are read, by torch's names of storages."""

MOST_PICKLE = 1 << 26
"""Bytes of the description of a checkpoint, at most."""

ALIGNMENT = 64
"""Bytes of which the places of numbers in a file are multiples, so that `torch.load` can map them."""


HEADER = 30
"""Bytes before an entry's name in a zip archive."""


class TorchFile:
    """An open checkpoint.

    Attributes:
      tensors: by name.
      others: names of entries that are no tensors; what they hold is not read.
    """

    def __init__(self, file: str | os.PathLike[str], archive: zipfile.ZipFile) -> None:
        self._file, self._archive = file, archive
        pickles = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(pickles) != 1:
            raise ValueError(
                f"{file} is no checkpoint of torch: it has {len(pickles)} entries data.pkl, expected one"
            )
        self._root = pickles[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        if order in archive.namelist() and self._read(order, most=16) != b"little":
            raise ValueError(f"{file} was written on a big-endian machine: save it again on another")
        try:
            state = read_state(self._read(pickles[0], most=MOST_PICKLE))
        except ValueError as error:
            raise ValueError(f"{file}: {one_line(error)}") from error
        self.tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
        self.others = [name for name in state if name not in self.tensors]

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in its own dtype.

        Raises:
          ValueError: its dtype is not in `KINDS`, or its numbers are missing or damaged.
        """
        tensor = self.tensors[name]
        if tensor.storage.kind not in KINDS:
            raise ValueError(
                f"{self._file}: {name} is torch.{tensor.storage.kind}Storage, expected one of {', '.join(KINDS)}"
            )
        dtype = np.dtype(KINDS[tensor.storage.kind])
        data = self._read(f"{self._root}data/{tensor.storage.key}", size=tensor.storage.size * dtype.itemsize)
        flat = np.frombuffer(data, dtype)[tensor.offset :]
        strides = [step * dtype.itemsize for step in tensor.stride]
        return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)

    def _read(self, entry: str, *, most: int | None = None, size: int | None = None) -> bytes:
        try:
            info = self._archive.getinfo(entry)
            wrong = info.file_size != size if most is None else info.file_size > most
            # An entry that is packed could be of any size once it is unpacked
            if wrong or info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{info.file_size} bytes, expected {size or f'at most {most}'}, not compressed"
                )
            return self._archive.read(info)
        except (KeyError, ValueError, EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self._file}: entry {entry} cannot be read: {one_line(error)}") from error


@contextmanager
def open_torch(file: str | os.PathLike[str]) -> Iterator[TorchFile]:
    """Open a checkpoint, or its parts.

    Raises:
      FileNotFoundError: neither the file nor its first part is there.
      ValueError: it is no zip archive, is cut off, or holds something else than tensors.
    """
    with _joined(Path(file)) as opened:
        try:
            archive = zipfile.ZipFile(opened)
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise ValueError(
                f"{file} is no whole zip archive, as torch.save writes: {one_line(error)}; copy it again"
            ) from error
        yield TorchFile(file, archive)


@contextmanager
def _joined(file: Path) -> Iterator[Any]:
    """Open the file, or its parts as one."""
    if not file.exists():
        parts = [file.with_name(f"{file.name}.part0")]
        while parts[-1].exists():
            parts.append(file.with_name(f"{file.name}.part{len(parts)}"))
        if len(parts) == 1:
            raise FileNotFoundError(f"{file} does not exist, and neither does {parts[0].name}")
        joined = Parts(parts[:-1])
    elif file.is_file():
        joined = Parts([file])
    else:
        raise ValueError(f"{file} is no regular file: expected a checkpoint of torch")
    with io.BufferedReader(joined, 1 << 20) as opened:
        yield opened


class Parts(io.RawIOBase):
    """Files one after the other as one that can be read and sought in."""

    def __init__(self, files: list[Path]) -> None:
        self._files = [file.open("rb", buffering=0) for file in files]
        self._ends = np.cumsum([file.stat().st_size for file in files]).tolist()
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._ends[-1]}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning of the file")
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        number = int(np.searchsorted(self._ends, self._place, side="right"))
        if number == len(self._ends):
            return 0
        begin = self._ends[number - 1] if number else 0
        file = self._files[number]
        file.seek(self._place - begin)
        read = file.readinto(memoryview(buffer)[: self._ends[number] - self._place])
        self._place += read
        return read

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


class Lazy(NamedTuple):
    """A tensor that is made when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], np.ndarray]


def write_torch(file: str | os.PathLike[str], tensors: Mapping[str, Lazy]) -> int:
    """Write tensors by name as a state dict that `torch.load` reads, whole or not at all. Returns the file's bytes.

    One tensor is in memory at a time.
    """
    kinds = {np.dtype(dtype): kind for kind, dtype in KINDS.items()}
    described = {}
    for i, (name, lazy) in enumerate(tensors.items()):
        storage = Storage(kinds[np.dtype(lazy.dtype)], str(i), int(np.prod(lazy.shape)))
        stride = tuple(int(np.prod(lazy.shape[axis + 1 :])) for axis in range(len(lazy.shape)))
        described[name] = Tensor(storage, 0, lazy.shape, stride)
    with whole_file(file) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", write_state(described))
        archive.writestr("archive/byteorder", "little")
        for number, lazy in zip(count(), tensors.values()):
            array = np.ascontiguousarray(lazy.make(), lazy.dtype)
            _write_aligned(archive, f"archive/data/{number}", array.reshape(-1).view(np.uint8))
        archive.writestr("archive/version", "3\n")
    return Path(file).stat().st_size


def _write_aligned(archive: zipfile.ZipFile, name: str, data: np.ndarray) -> None:
    """Write an entry whose bytes begin at a multiple of `ALIGNMENT`, by a field of that length before them."""
    info = zipfile.ZipInfo(name)
    info.file_size = data.nbytes
    assert archive.fp is not None
    # The sizes of a large entry stand in a field of 20 bytes more
    wide = 20 if data.nbytes * 1.05 > zipfile.ZIP64_LIMIT else 0
    start = archive.fp.tell() + HEADER + len(name) + wide + 4
    gap = -start % ALIGNMENT
    info.extra = b"FB" + gap.to_bytes(2, "little") + b"Z" * gap
    with archive.open(info, "w") as entry:
        entry.write(memoryview(data))
