"""Is what was read what was saved: names and shapes of leaves, sums of their bits, sizes of the files."""

import json
import zlib
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

FILE_LIST = "files.json"
CHECKSUM_BELOW = 1 << 20


class CheckpointCorrupt(RuntimeError):
    """A checkpoint cannot be read, or not as it was written."""


class StateMismatch(ValueError):
    """A checkpoint holds other names, shapes or dtypes than those asked for."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, e.g. `"params/embed/kernel"`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_stored(leaf: Any) -> tuple[tuple[int, ...], np.dtype | None]:
    """Shape and dtype on disk; typed keys are stored as their uint32 words, Python numbers have no dtype."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    dtype = getattr(leaf, "dtype", None)
    return tuple(getattr(leaf, "shape", ())), None if dtype is None else np.dtype(dtype)


def check_leaves(stored: Any, wanted: Any, *, where: str, cast: bool = False) -> set[str]:
    """The names of the leaves whose dtypes differ, which only `cast` permits.

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
    """Raises CheckpointCorrupt naming an array that is not of the type asked for, e.g. a key read as plain words."""
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
    """Per array, the sum of its words modulo 2^32: exact, so it does not depend on the mesh.

    Words are as wide as the array's items, at most 32 bits. Arrays that are not in this host's memory are summed where
    they are, at the price of a small compilation for each shape.
    """
    arrays = {name: leaf for name, leaf in named_leaves(tree).items() if hasattr(leaf, "dtype")}
    sums = {name: _sum_of_words(leaf) for name, leaf in arrays.items()}
    return {name: int(value) for name, value in jax.device_get(sums).items()}


def check_fingerprint(tree: Any, stored: dict[str, int], *, skip: Set[str] = frozenset()) -> None:
    """Raises CheckpointCorrupt naming the arrays whose bits are not those that were saved."""
    found = fingerprint(tree)
    changed = sorted(name for name, value in found.items() if name not in skip and stored[name] != value)
    if changed:
        raise CheckpointCorrupt(f"the bits of {changed[:4]} are not those that were saved")


def _describe(file: epath.Path) -> list[int]:
    size = file.stat().length
    return [size, zlib.crc32(file.read_bytes())] if size < CHECKSUM_BELOW else [size]


def _files(folder: epath.Path) -> list[epath.Path]:
    # Commit marks are written later than the list, and carry no data.
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith("commit")]
    return [file for entry in entries for file in (_files(entry) if entry.is_dir() else [entry])]


def write_file_list(folder: epath.Path) -> None:
    """Notes the sizes (and, of small files, the CRC-32) of all files in the folders below `folder`."""
    files = [file for part in folder.iterdir() if part.is_dir() for file in _files(part)]
    listing = {str(file.relative_to(folder)): _describe(file) for file in files}
    (folder / FILE_LIST).write_text(json.dumps(listing))


def check_files(folder: epath.Path) -> None:
    """Raises CheckpointCorrupt if a listed file is missing, cut or changed; without a list all is well."""
    if not (folder / FILE_LIST).exists():
        return
    try:
        listing = json.loads((folder / FILE_LIST).read_text())
    except ValueError as error:
        raise CheckpointCorrupt(f"{folder / FILE_LIST} is not JSON: {error}") from error
    for name, expected in listing.items():
        file = folder / name
        if not file.exists():
            raise CheckpointCorrupt(f"{file} is missing")
        if (found := _describe(file)) != expected:
            raise CheckpointCorrupt(f"{file} changed: [bytes, crc] {found}, written as {expected}")
