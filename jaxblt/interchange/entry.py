"""Tensors of a foreign checkpoint as parameters of jaxblt: one entry a tensor, read and rewritten one by one."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxblt.interchange.runs import write_run_folder
from jaxblt.interchange.tensors import Shapes, check_entries, read_header, read_tensors
from jaxblt.interchange.torch_file import open_torch
from jaxblt.interchange.weight_files import weight_files
from jaxblt.training.flops import countable_device
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import Frozen

BESIDE = 1 << 16
"""Bytes that the writer may hold at a time besides the largest array: it takes none that fills its room."""


class Entry(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
      shape: as stored.
      params: names of the parameters that it becomes; () for one that is compared and not kept.
      ours: makes them of it. Raises ValueError for numbers that no parameter stands for.
      theirs: makes it of them. Raises ValueError for parameters that no tensor stands for.
    """

    shape: tuple[int, ...]
    params: tuple[str, ...]
    ours: Callable[[Any], tuple[Any, ...]]
    theirs: Callable[..., Any]


def same(shape: tuple[int, ...], name: str) -> Entry:
    """Return the entry of a tensor that is a parameter as it is."""
    return Entry(shape, (name,), lambda x: (x,), lambda x: x)


def turned(shape: tuple[int, ...], name: str) -> Entry:
    """Return the entry of a matrix [out, in], which is a kernel [in, out]."""
    return Entry(shape, (name,), lambda x: (x.transpose(1, 0),), lambda x: x.transpose(1, 0))


def inside(prefix: str, entries: Mapping[str, Entry], params: str) -> dict[str, Entry]:
    """Return entries of a block with the names that the block has: of tensors and of parameters."""
    return {
        prefix + name: entry._replace(params=tuple(params + param for param in entry.params))
        for name, entry in entries.items()
    }


class Source(NamedTuple):
    """Tensors of a checkpoint: shapes by name, and what reads one."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def is_torch(path: Path) -> bool:
    """Return whether a path names a checkpoint of torch, or its first part."""
    return path.suffix == ".pt" or path.name.endswith(".pt.part0")


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a `.pt` file, a safetensors file, or a folder of safetensors files with an index."""
    if is_torch(path):
        with open_torch(path) as found:
            yield Source({name: x.shape for name, x in found.tensors.items()}, found.read)
        return
    files = list(weight_files(path)) if path.is_dir() else [path]
    headers = {file: read_header(file).arrays for file in files}
    where = {name: file for file, arrays in headers.items() for name in arrays}
    shapes = {name: headers[file][name].shape for name, file in where.items()}
    yield Source(shapes, lambda name: read_tensors(where[name], [name])[name])


def check_source(where: str, found: Mapping[str, tuple[int, ...]], known: Mapping[str, Entry]) -> None:
    """Raise ValueError unless names and shapes are those known; one line names all that differ."""
    expected = {name: entry.shape for name, entry in known.items()}
    check_entries(f"{where} does not hold the model of its config", _floats(found), _floats(expected))


def _floats(shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return shapes of arrays of one dtype, as any float will do: all are widened."""
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def read_entries(where: str, opened: Source, known: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the parameters of a part of a checkpoint as a tree, in memory and in fp32.

    Raises:
      ValueError: a tensor is not finite, or no parameter stands for it.
    """
    params = {}
    for key, entry in known.items():
        params |= _made(f"{where}: {key}", entry, opened.read(key))
    return unflatten_dict(params, sep=".")


def write_entries(
    run_dir: str | os.PathLike[str],
    recipe: Recipe,
    where: str,
    opened: Source,
    known: Mapping[str, Entry],
    frozen: Mapping[str, Frozen] = MappingProxyType({}),
) -> None:
    """Make a run folder of a checkpoint, tensor by tensor, and of trees that are frozen beside it.

    Each goes to a file beside the folder before the next is read, and the checkpoint is written from these files. So
    host memory is about twice the largest tensor, in fp32.

    Raises:
      FileExistsError: the folder holds something.
      ValueError: a tensor is not finite, or no parameter stands for it.
    """
    with tempfile.TemporaryDirectory(dir=_beside(run_dir)) as scratch:
        params = {}
        for key, entry in known.items():
            params |= _rewritten(f"{where}: {key}", entry, opened.read(key), Path(scratch))
        most = max(array.nbytes for array in params.values())
        write_run_folder(
            run_dir, recipe, unflatten_dict(params, sep="."), dict(frozen), step=0, at_a_time=most + BESIDE
        )


def _beside(run_dir: str | os.PathLike[str]) -> Path:
    """Return the folder that a run's folder lies in; its disk is where the parameters go in the end."""
    folder = Path(run_dir).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rewritten(where: str, entry: Entry, tensor: np.ndarray, folder: Path) -> dict[str, Any]:
    """Return the parameters that a tensor becomes, by name, in files of their own."""
    made = _made(where, entry, tensor)
    return {name: _kept(folder / f"{name}.npy", array) for name, array in made.items()}


def _made(where: str, entry: Entry, tensor: np.ndarray) -> dict[str, Any]:
    """Return the parameters that a tensor becomes, by name."""
    tensor = tensor.astype(np.float32, copy=False)
    if not np.isfinite(tensor).all():
        raise ValueError(f"{where} holds NaN or infinity: copy the file again")
    try:
        made = entry.ours(tensor)
    except ValueError as error:
        raise ValueError(f"{where} is {error}") from error
    return dict(zip(entry.params, made, strict=True))


def _kept(path: Path, array: np.ndarray) -> Any:
    """Return the array in a file, whose pages the system may drop from memory."""
    file = np.lib.format.open_memmap(path, "w+", np.float32, array.shape)
    file[...] = array
    file.flush()
    del file
    kept, cpu = np.lib.format.open_memmap(path, "r"), countable_device()
    # Orbax would copy arrays of numpy before it writes; one of JAX on the CPU is the file's pages
    return kept if cpu is None else jax.device_put(kept, cpu)
