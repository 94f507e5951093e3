"""Is what was read what was saved: names and shapes of leaves, sums of their bits, sizes of the files."""

import json
import math
import os
import zlib
from collections.abc import Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxblt.training.stored.safe_files import sizes_below

FILE_LIST = "files.json"
CHECKSUM_BELOW = 1 << 20

EXPANDED = 16
"""How many times larger than its files the arrays of a step may be; random fp32 numbers take their own size."""

EXPANDED_FREELY = 1 << 26
"""Bytes of arrays that any step may hold: small models compress as they like."""


class CheckpointCorrupt(RuntimeError):
    """A checkpoint cannot be read, or not as it was written."""


class StateMismatch(ValueError):
    """A checkpoint holds other names, shapes or dtypes than those asked for."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return leaves by path, e.g. `"params/embed/kernel"`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_stored(leaf: Any) -> tuple[tuple[int, ...], np.dtype | None]:
    """Return shape and dtype on disk; typed keys are stored as uint32 words, Python numbers have no dtype."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    dtype = getattr(leaf, "dtype", None)
    return tuple(getattr(leaf, "shape", ())), None if dtype is None else np.dtype(dtype)


def check_leaves(stored: Any, wanted: Any, *, where: str, cast: bool = False) -> set[str]:
    """Return the names of the leaves whose dtypes differ, which only `cast` permits.

    Raises:
      StateMismatch: names, shapes or (without `cast`) dtypes differ; the message lists them.
    """
    have, want = named_leaves(stored), named_leaves(wanted)
    problems = [f"{name}: asked for, not stored" for name in want if name not in have]
    problems += [f"{name}: stored, not asked for" for name in have if name not in want]
    recast = set()
    for name in want.keys() & have.keys():
        (shape, dtype), (want_shape, want_dtype) = _as_stored(have[name]), _as_stored(want[name])
        if shape != want_shape:
            problems.append(f"{name}: stored shape {shape}, asked for {want_shape}")
        elif None not in (dtype, want_dtype) and dtype != want_dtype:
            recast.add(name)
            problems += [] if cast else [f"{name}: stored dtype {dtype}, asked for {want_dtype}"]
    if problems:
        more = f"\n  ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateMismatch(
            f"{where} holds another state than the one asked for; use the config it was trained with, "
            f"or another run directory:\n  " + "\n  ".join(sorted(problems)[:8]) + more
        )
    return recast


def check_types(got: Any, wanted: Any) -> None:
    """Raise CheckpointCorrupt naming an array that is not of the type asked for, e.g. a key read as plain words."""
    for (name, leaf), asked in zip(named_leaves(got).items(), jax.tree.leaves(wanted), strict=True):
        found = getattr(leaf, "dtype", None)
        if found != getattr(asked, "dtype", found):
            raise CheckpointCorrupt(f"{name} was read as {found} instead of {asked.dtype}")


WORDS = {1: jnp.uint8, 2: jnp.uint16}


@jax.jit
def _sum_on_device(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, WORDS.get(x.dtype.itemsize, jnp.uint32))
    return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)


def _sum_on_host(x: np.ndarray) -> np.uint32:
    words = np.ascontiguousarray(x).reshape(-1).view(WORDS.get(x.dtype.itemsize, jnp.uint32))
    return words.sum(dtype=np.uint32)


def _sum_of_words(leaf: Any) -> Any:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    on_host = not isinstance(leaf, jax.Array) or (
        leaf.is_fully_addressable and next(iter(leaf.devices())).platform == "cpu"
    )
    return _sum_on_host(np.asarray(leaf)) if on_host else _sum_on_device(leaf)


def fingerprint(tree: Any) -> dict[str, int]:
    """Return per array the sum of its words modulo 2^32: exact, so it does not depend on the mesh.

    Words are as wide as the array's items, at most 32 bits. Arrays that are not in this host's memory are summed where
    they are, at the price of a small compilation for each shape.
    """
    arrays = {name: leaf for name, leaf in named_leaves(tree).items() if hasattr(leaf, "dtype")}
    sums = {name: _sum_of_words(leaf) for name, leaf in arrays.items()}
    return {name: int(value) for name, value in jax.device_get(sums).items()}


def check_fingerprint(tree: Any, stored: dict[str, int], *, skip: Set[str] = frozenset()) -> None:
    """Raise CheckpointCorrupt naming the arrays whose bits are not those that were saved."""
    found = fingerprint(tree)
    changed = sorted(name for name, value in found.items() if name not in skip and stored[name] != value)
    if changed:
        raise CheckpointCorrupt(f"the bits of {changed[:4]} are not those that were saved")


def _describe(file: epath.Path) -> list[int]:
    size = os.stat(file).st_size
    return [size, zlib.crc32(file.read_bytes())] if size < CHECKSUM_BELOW else [size]


def _files(folder: epath.Path) -> list[epath.Path]:
    # Commit marks are written later than the list, and carry no data.
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith("commit")]
    return [file for entry in entries for file in (_files(entry) if entry.is_dir() else [entry])]


def write_file_list(folder: epath.Path) -> None:
    """Note the sizes (and, of small files, the CRC-32) of all files in the folders below `folder`."""
    files = [file for part in folder.iterdir() if part.is_dir() for file in _files(part)]
    listing = {str(file.relative_to(folder)): _describe(file) for file in files}
    (folder / FILE_LIST).write_text(json.dumps(listing))


def check_room(stored: Any, folder: epath.Path) -> None:
    """Raise CheckpointCorrupt if the arrays of `stored` would take far more memory than the files of their step."""
    arrays, most = named_leaves(stored), EXPANDED_FREELY + EXPANDED * sum(sizes_below(folder))
    total = 0
    for name, leaf in arrays.items():
        shape, dtype = _as_stored(leaf)
        chunk = getattr(getattr(leaf, "storage_metadata", None), "chunk_shape", None) or ()
        if math.prod(chunk) > max(math.prod(shape), 1):
            raise CheckpointCorrupt(f"{folder}: {name} of shape {shape} is said to come in chunks of {chunk}")
        total += math.prod(shape) * (1 if dtype is None else dtype.itemsize)
    if total > most:
        raise CheckpointCorrupt(
            f"{folder} describes arrays of {total} bytes, and its files hold at most {most}: its description is false"
        )


def _listing(folder: epath.Path) -> dict[str, list[int]]:
    try:
        listing = json.loads((folder / FILE_LIST).read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{folder / FILE_LIST} is not JSON: {error}") from None
    entries = listing.items() if isinstance(listing, dict) else [("", listing)]
    for name, expected in entries:
        if not name or not isinstance(expected, list) or not expected:
            raise CheckpointCorrupt(
                f"{folder / FILE_LIST} holds {expected!r:.80}, expected file: [bytes, crc]"
            )
    return dict(entries)


def check_files(folder: epath.Path) -> None:
    """Check the files of a step, by their sizes before their bytes; without a list only what they are.

    Raises:
      CheckpointCorrupt: a listed file is missing, cut or changed, or lies outside the folder.
      UnsafeFile: what the folder holds leads out of it, is no regular file, or is a description too large to read.
    """
    sum(sizes_below(folder))
    if not (folder / FILE_LIST).exists():
        return
    for name, expected in _listing(folder).items():
        file = folder / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise CheckpointCorrupt(f"{folder / FILE_LIST} names {name!r}, which lies outside the folder")
        if not file.exists():
            raise CheckpointCorrupt(f"{file} is missing")
        size = os.stat(file).st_size
        if (found := [size] if size != expected[0] else _describe(file)) != expected:
            raise CheckpointCorrupt(f"{file} changed: [bytes, crc] {found}, written as {expected}")
