"""An index: vectors of chunks, whose they are, and what it takes to compare a query with them; as arrays and as a file.

A base vector of a chunk is the mean of its tokens' inputs to a stack, each divided by its root mean square. Base
vectors share most of their length. So the index's mean is subtracted from them, and the rest is made a unit vector.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxblt.adapters.retrieval.features import FEATURES, neighbour_features
from jaxblt.adapters.retrieval.search import Found, nearest
from jaxblt.outputs import check_output, whole_file
from jaxblt.seals import check_seal, seal
from jaxblt.show import show

FILE = "index.safetensors"
FORMAT, VERSION = "jaxblt index", "1"
ARRAYS = {"vectors": np.float32, "owners": np.int32, "center": np.float32, "norms": np.float32}
TEXTS = ("format", "version", "base", "stack", "chunk", "neighbours")
OWNER_BYTES = 4
"""Of a document's key among parameters, a float each: whole numbers to 255 are exact in every dtype that is stored."""
LEAST_SPREAD = 1e-6
"""Standard deviation below which a feature is the same everywhere, and is not divided by it."""
QUERIES = 1024
"""The most chunks of an index that the norms of its features are taken from."""


@dataclass(frozen=True, eq=False)
class Index:
    """Chunks of documents, as a base sees them.

    Attributes:
      vectors: Float32[N, D], unit vectors.
      owners: Int32[N], key of each chunk's document.
      center: Float32[D], the mean of the base vectors.
      norms: Float32[2, F], mean and standard deviation of the features of the index's own chunks.
      base: content hash of the base's parameters.
      stack: name of the stack whose inputs were read.
      chunk: steps of a chunk.
      neighbours: k, that the norms are of.
    """

    vectors: np.ndarray
    owners: np.ndarray
    center: np.ndarray
    norms: np.ndarray
    base: str
    stack: str
    chunk: int
    neighbours: int

    __repr__ = show

    def __len__(self) -> int:
        return len(self.vectors)

    def params(self, capacity: int) -> dict[str, np.ndarray]:
        """Return the arrays of the router's child "index", of `capacity` places, the last ones empty.

        Raises:
          ValueError: there are more chunks.
        """
        if len(self) > capacity:
            raise ValueError(
                f"an index of {len(self)} chunks does not fit Neighbours.capacity = {capacity}: raise it to "
                f"{len(self)}, or make a smaller index"
            )
        room = ((0, capacity - len(self)), (0, 0))
        return {
            "vectors": np.pad(self.vectors, room),
            "owners": np.pad(owner_bytes(self.owners), room),
            "center": self.center,
            "norms": self.norms,
        }

    def check(self, read: Any, *, chunk: int, base: str, stack: str, dim: int) -> None:
        """Raise ValueError, naming what differs and the fix, unless a router's queries can be compared with it.

        Args:
          read: the router's `Neighbours`.
          chunk: steps of the router's chunks.
          base: content hash of the base's parameters.
          stack: name of the router's stack.
          dim: its width.
        """
        expected = {
            "base of content hash": (self.base, base, "make an index of this base"),
            "stack": (self.stack, stack, f"make the index with stack={stack!r}"),
            "chunk": (
                self.chunk,
                chunk,
                f"set RouterConfig.chunk = {self.chunk}, or make a new index",
            ),
            "width": (self.vectors.shape[1], dim, "make an index of this base"),
            "neighbours": (
                self.neighbours,
                read.count,
                f"set Neighbours.count = {self.neighbours}, or make a new index",
            ),
        }
        for name, (have, want, fix) in expected.items():
            if have != want:
                raise ValueError(f"index {read.index!r} has {name} {have}, expected {want}: {fix}")


def owner_bytes(owners: np.ndarray) -> np.ndarray:
    """Return the bytes of keys, the lowest first, Float32[N, 4]."""
    return np.ascontiguousarray(owners, "<i4").view(np.uint8).reshape(-1, OWNER_BYTES).astype(np.float32)


def owner_keys(parts: Float[Array, "N P"]) -> Array:
    """Return the inverse of `owner_bytes`, Int32[N]."""
    places = jnp.left_shift(1, 8 * jnp.arange(OWNER_BYTES, dtype=jnp.int32))[None]
    return jnp.sum(parts.astype(jnp.int32) * places, -1, dtype=jnp.int32)


def unit(base: Float[Array, "... D"], center: Float[Array, "D"]) -> Float[Array, "... D"]:
    """Return base vectors as they are compared: centred, of length 1; zero where nothing is left."""
    apart = base - center.reshape((1,) * (base.ndim - 1) + (-1,))
    length = jnp.sqrt(jnp.sum(apart * apart, -1, keepdims=True))
    return apart / jnp.where(length > 0, length, 1.0)


def features_of(found: Found, vectors: Float[Array, "N D"]) -> Float[Array, "Q F"]:
    """Return the features of each query's neighbours, before norms."""
    there = vectors[found.place]
    pairs = jnp.einsum("qid,qjd->qij", there, there, precision=jax.lax.Precision.HIGHEST)
    return neighbour_features(found.similar, pairs, found.present)


def make_index(
    base_vectors: np.ndarray, owners: np.ndarray, *, base: str, stack: str, chunk: int, neighbours: int
) -> Index:
    """Make an index of chunks, with norms of at most 1,024 of them as queries, their own documents left out.

    Args:
      base_vectors: Float[N, D], of each chunk.
      owners: Int[N], key of its document.
      base: as of `Index`, and so are stack, chunk and neighbours.

    Raises:
      ValueError: there is no chunk, or fewer than neighbours, or a vector is not finite.
    """
    count = len(base_vectors)
    if not count:
        raise ValueError(
            f"an index needs a chunk, got none: give documents longer than chunk = {chunk} steps"
        )
    if neighbours > count:
        raise ValueError(
            f"an index of {count} chunks has no neighbours = {neighbours}: use fewer, or index more documents"
        )
    if not np.isfinite(base_vectors).all():
        raise ValueError(
            "base vectors of an index must be finite, got NaN or infinity: check the base's parameters"
        )
    center = base_vectors.mean(0, np.float64).astype(np.float32)
    keys = np.asarray(owners, np.int32)
    some = np.unique(np.linspace(0, count - 1, min(count, QUERIES)).astype(np.int32))
    given = [jnp.asarray(x) for x in (base_vectors.astype(np.float32), center, keys, some)]
    vectors, features = (np.asarray(x) for x in _compared(*given, neighbours))
    spread = features.std(0)
    norms = np.stack([features.mean(0), np.where(spread > LEAST_SPREAD, spread, 1.0)]).astype(np.float32)
    return Index(vectors, keys, center, norms, base, stack, chunk, neighbours)


@partial(jax.jit, static_argnums=4)
def _compared(
    base: Float[Array, "N D"], center: Float[Array, "D"], keys: Int[Array, "N"], some: Int[Array, "Q"], k: int
) -> tuple[Float[Array, "N D"], Float[Array, "Q F"]]:
    """Return unit vectors of all chunks, and the features of some of them as queries."""
    vectors = unit(base, center)
    found = nearest(vectors[some], vectors, k, owners=keys, own=keys[some])
    return vectors, features_of(found, vectors)


def new_index_path(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Return where `save_index` writes to in a folder.

    Raises:
      FileExistsError: the folder holds an index, and it is not to be overwritten.
      ValueError: the folder is a URL, or holds something else of this name.
    """
    path = Path(folder) / FILE
    check_output("--out", path, overwrite=overwrite)
    return path


def save_index(index: Index, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `index.safetensors` into a folder, whole or not at all, and return its path.

    Raises:
      FileExistsError: the folder holds an index, and it is not to be overwritten.
    """
    path = new_index_path(folder, overwrite=overwrite)
    texts = {"format": FORMAT, "version": VERSION, **{name: str(getattr(index, name)) for name in TEXTS[2:]}}
    arrays = {name: np.ascontiguousarray(getattr(index, name)) for name in ARRAYS}
    with whole_file(path) as file:
        save_file(arrays, file, seal(arrays, texts))
    return path


def load_index(folder: str | os.PathLike[str]) -> Index:
    """Read an index that `save_index` wrote; nothing in the file is taken on trust.

    Raises:
      FileNotFoundError: there is none.
      ValueError: the file is damaged, of another format, or its arrays do not go together.

    Warns:
      UnsealedWarning: the file is of an earlier version, and has no hash.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no index: {FILE} is missing; `jaxblt index RUN --out {folder}` makes one"
        )
    try:
        with safe_open(path, framework="np") as file:
            said, names = dict(file.metadata() or {}), set(file.keys())
            arrays = {name: np.array(file.get_tensor(name)) for name in ARRAYS if name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if (said.get("format"), said.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} has format {said.get('format')!r} {said.get('version')!r}, expected {FORMAT!r} {VERSION!r}: make "
            "the index anew"
        )
    _check_arrays(path, said, names, arrays)
    check_seal(path, arrays, said, ours=True)
    return Index(
        **arrays,
        base=said["base"],
        stack=said["stack"],
        chunk=int(said["chunk"]),
        neighbours=int(said["neighbours"]),
    )


def _check_arrays(path: Path, said: dict[str, str], names: set[str], arrays: dict[str, np.ndarray]) -> None:
    if names != set(ARRAYS) or any(not said.get(name) for name in TEXTS):
        raise ValueError(
            f"{path} holds {sorted(names)} and says {sorted(said)}, expected {sorted(ARRAYS)} and {sorted(TEXTS)}: "
            "make the index anew"
        )
    for name in ("chunk", "neighbours"):
        if not said[name].isdecimal() or not int(said[name]):
            raise ValueError(
                f"{path} has {name} = {said[name]!r}, expected a whole number above 0: make the index anew"
            )
    vectors = arrays["vectors"]
    count, dim = vectors.shape if vectors.ndim == 2 else (0, 0)
    shapes = {"vectors": (count, dim), "owners": (count,), "center": (dim,), "norms": (2, len(FEATURES))}
    have = {name: (x.shape, x.dtype) for name, x in arrays.items()}
    want = {name: (shapes[name], np.dtype(dtype)) for name, dtype in ARRAYS.items()}
    if have != want or not count:
        raise ValueError(
            f"{path} holds arrays {have}, expected {want} with a vector or more: make the index anew"
        )
