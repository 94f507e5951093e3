"""Safetensors files: arrays by name with text beside them, written whole and sealed, checked before they are read."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save, save_file

from jaxblt.outputs import check_output, whole_file
from jaxblt.seals import seal
from jaxblt.training.stored.safe_files import one_line

DTYPES = {
    "F32": jnp.float32,
    "BF16": jnp.bfloat16,
    "F16": jnp.float16,
    "I32": jnp.int32,
    "I64": np.int64,
    "U32": jnp.uint32,
    "U8": jnp.uint8,
    "I8": jnp.int8,
    "F8_E4M3": jnp.float8_e4m3fn,
    "BOOL": jnp.bool_,
}
"""The format's names of dtypes that are read and written."""

SHOWN = 20
"""Entries of each kind that an error names; it counts the others."""

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


class Header(NamedTuple):
    """A file's account of itself: its text by name, and the shape and dtype of each array."""

    metadata: dict[str, str]
    arrays: dict[str, jax.ShapeDtypeStruct]


def check_new(
    file: str | os.PathLike[str],
    *,
    inputs: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
) -> None:
    """Check that a file can be written, as `check_output`, and that its folder is there.

    Raises:
      FileExistsError: it is there, and is not to be overwritten.
      FileNotFoundError: its folder is not.
      ValueError: it is a URL, an input, or no regular file.
    """
    check_output("--out", file, inputs=inputs, overwrite=overwrite)
    folder = Path(file).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {str(folder)!r}")


def write_tensors(
    file: str | os.PathLike[str], arrays: Mapping[str, Any], metadata: Mapping[str, str]
) -> int:
    """Write arrays and text by name, sealed, whole or not at all, and return the file's bytes.

    Raises:
      ValueError: an array has a dtype that is not in `DTYPES`, or a number that is not finite.
    """
    ready = _ready(arrays)
    sealed = seal(ready, metadata)
    with whole_file(file) as partial:
        save_file(ready, partial, sealed)
    return Path(file).stat().st_size


def pack_tensors(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays by name as the bytes of a safetensors file.

    Errors are those of `write_tensors`.
    """
    return save(_ready(arrays))


def unpack_tensors(data: bytes) -> Arrays:
    """Undo `pack_tensors`."""
    return {
        name: np.frombuffer(told["data"], DTYPES[told["dtype"]]).reshape(told["shape"])
        for name, told in deserialize(data)
    }


def _ready(arrays: Mapping[str, Any]) -> Arrays:
    # Make arrays contiguous: the library writes their memory as it lies, whatever the strides
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    known = [np.dtype(dtype) for dtype in DTYPES.values()]
    for name, array in whole.items():
        if array.dtype not in known:
            raise ValueError(f"{name} is {array.dtype}, expected one of {', '.join(map(str, known))}")
    return whole


def read_header(file: str | os.PathLike[str]) -> Header:
    """Read what a file says of itself; no array is read.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: it is no safetensors file, or an array's dtype is not in `DTYPES`.
    """
    path = Path(file)
    if not path.exists():
        raise FileNotFoundError(f"{file} does not exist: expected a safetensors file")
    if not path.is_file():
        raise ValueError(f"{file} is no regular file: expected a safetensors file")
    try:
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            told = {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}
            metadata = dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file: {one_line(error)}") from error
    if scaled := [f"{name} ({dtype})" for name, (dtype, _) in told.items() if dtype.startswith("F8")]:
        raise ValueError(
            f"{file} holds {listed(scaled)}: FP8 numbers mean nothing without their scales, which are not read: write "
            "them as BF16 or F32"
        )
    unknown = sorted({f"{name} ({dtype})" for name, (dtype, _) in told.items() if dtype not in DTYPES})
    if unknown:
        raise ValueError(f"{file} holds {listed(unknown)}, expected dtypes {', '.join(DTYPES)}")
    arrays = {name: jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for name, (dtype, shape) in told.items()}
    return Header(metadata, arrays)


def check_entries(where: str, found: Shapes, expected: Shapes) -> None:
    """Raise ValueError unless names, shapes and dtypes are those expected.

    One line names all that differ.
    """
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing {listed(missing)}")
    if unexpected := [name for name in found if name not in expected]:
        problems.append(f"unexpected {listed(unexpected)}")
    both = [name for name in expected if name in found]
    for what in ("shape", "dtype"):
        pairs = [(name, getattr(found[name], what), getattr(expected[name], what)) for name in both]
        if wrong := [f"{name} is {have}, expected {want}" for name, have, want in pairs if have != want]:
            problems.append(f"wrong {what}: {listed(wrong)}")
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")


def read_tensors(file: str | os.PathLike[str], names: Iterable[str]) -> Arrays:
    """Read arrays by name into this process's own memory."""
    with safe_open(file, framework="np") as opened:
        return {name: np.array(opened.get_tensor(name)) for name in names}


def listed(names: Iterable[str]) -> str:
    """Join names by commas: the first twenty, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more
