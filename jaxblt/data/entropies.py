"""Precomputed entropies: one `.npy` file for a source, and beside it a note of what it was computed from."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxblt.data.sources.base import DocumentSource
from jaxblt.outputs import whole_file, write_text
from jaxblt.remote import refuse_remote
from jaxblt.seals import check_seal, seal
from jaxblt.show import show

_CHUNK = 1 << 24
VALUES = "entropies"
"""The name of the values in the seal of the note."""
FIELDS = ("source_sha256", "model", "documents", "values")
"""The entries that every note has."""
TOLD = FIELDS[:2]
"""The fields that are texts."""


def source_hash(source: DocumentSource) -> str:
    """Return the SHA-256 of the documents: their number, lengths and bytes, without names."""
    digest = hashlib.sha256(np.array([len(source), *source.lengths], "<i8").tobytes())
    for i, length in enumerate(source.lengths.tolist()):
        for start in range(0, length, _CHUNK):
            digest.update(source.read(i, start, min(start + _CHUNK, length)))
    return digest.hexdigest()


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def write_entropies(
    path: str | os.PathLike,
    source: DocumentSource,
    entropies: Iterable[np.ndarray],
    *,
    model: str = "",
    context: int | None = None,
) -> None:
    """Write the entropies of every document of `source`, in order.

    The file appears under its name only when it is complete.

    Args:
      path: a `.npy` file; `<path>.json` is written beside it.
      source: the whole documents, before any split.
      entropies: for each document of n bytes, n + 1 values in nats: of the prediction made at BOS, b_0, ...,
        b_{n-1}.
      model: the content hash of the entropy model, kept in the note; "" if it is not known.
      context: bytes that the model saw at the most (see `jaxblt.patching.contexts`), kept in the note.

    Raises:
      ValueError: the path does not end in `.npy`.
      ValueError: a document has another number of values, or one that is not finite.
      ValueError: documents are missing or too many.
    """
    refuse_remote("entropies", path)
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"entropies are written to a .npy file, got {str(path)!r}")
    shape = (int(source.lengths.sum()) + len(source),)
    with whole_file(path) as partial:
        out = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
        _fill(out, source, entropies)
        out.flush()
        note = {"source_sha256": source_hash(source), "model": model, "context": context}
        note = seal({VALUES: out}, note | {"documents": len(source), "values": shape[0]})
        del out
        write_text(_note(path), json.dumps(note, indent=2) + "\n")


def _fill(out: np.ndarray, source: DocumentSource, entropies: Iterable[np.ndarray]) -> None:
    offset, documents = 0, 0
    for i, values in enumerate(entropies):
        if i >= len(source):
            raise ValueError(f"entropies of more than the source's {len(source)} documents were given")
        values, expected = np.asarray(values, np.float32), int(source.lengths[i]) + 1
        if values.shape != (expected,):
            raise ValueError(
                f"document {i} needs {expected} entropies (its bytes and BOS), got shape {values.shape}"
            )
        if not np.isfinite(values).all():
            raise ValueError(
                f"document {i} has an entropy that is not finite, at {int(np.isfinite(values).argmin())}"
            )
        out[offset : offset + expected] = values
        offset, documents = offset + expected, i + 1
    if documents < len(source):
        raise ValueError(f"entropies of {documents} documents were given, the source has {len(source)}")


@dataclass(frozen=True, eq=False)
class Entropies:
    """Entropies of a source, read from the file where they are needed.

    Attributes:
      values: Float32[bytes + N], memory-mapped.
      offsets: Int64[N], where each document's values begin.
      model: the content hash of the entropy model that made them; "" if it is not known.
      context: bytes that it saw at the most; None without a bound.
    """

    values: np.ndarray
    offsets: np.ndarray
    model: str
    context: int | None = None

    __repr__ = show

    def check(self, model: str, context: int | None) -> None:
        """Raise ValueError unless a model with this hash, in this context, gives these entropies."""
        if self.model and self.model != model:
            raise ValueError(
                f"data.entropies were made by another entropy model ({self.model[:12]}) than that of entropy_run "
                f"({model[:12]}), which cuts patches where a model generates: write them again from that run "
                "(jaxblt patch --entropies-out)"
            )
        if self.context != context:
            raise ValueError(
                f"data.entropies were made in a context of {self.context} bytes, and the patcher has entropy_context "
                f"= {context}: write them again from entropy_run (jaxblt patch --entropies-out)"
            )

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Read Float32[stop - start]: predictions at inputs [start, stop) of BOS, b_0, ..."""
        offset = int(self.offsets[document])
        return np.array(self.values[offset + start : offset + stop])


def read_entropies(path: str | os.PathLike, source: DocumentSource) -> Entropies:
    """Open the entropies of `source` (the whole documents, before any split).

    Raises:
      FileNotFoundError: the file or its note is missing.
      ValueError: they were computed from other bytes, or they are not as they were written.
      ValueError: they are not a finite fp32 number for each byte and document.

    Warns:
      UnsealedWarning: the note is of an earlier version, and has no hash.
    """
    refuse_remote("entropies", path)
    path = Path(path)
    for file in (path, _note(path)):
        if not file.exists():
            raise FileNotFoundError(
                f"no precomputed entropies at {str(file)!r}: write them first (write_entropies)"
            )
    note = _read_note(path)
    actual = source_hash(source)
    if note["source_sha256"] != actual:
        raise ValueError(
            f"{str(path)!r} belongs to other data (sha256 {note['source_sha256'][:12]}, the source has "
            f"{actual[:12]}): compute the entropies again"
        )
    values = _read_values(path, int(source.lengths.sum()) + len(source))
    check_seal(path, {VALUES: values}, note, ours=True)
    offsets = np.cumsum(source.lengths + 1) - (source.lengths + 1)
    # Take no hash from notes without a context: they are older, and hashed the model in another form
    model = note["model"] if "context" in note else ""
    return Entropies(values, offsets, model, note.get("context"))


def _read_note(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(_note(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_note(path)} is not JSON ({error}): write the entropies again") from error
    if missing := [name for name in FIELDS if not isinstance(note, dict) or name not in note]:
        raise ValueError(f"{_note(path)} lacks {', '.join(missing)}: write the entropies again")
    if wrong := [name for name in TOLD if not isinstance(note[name], str)]:
        raise ValueError(f"{_note(path)} holds no text as {', '.join(wrong)}: write the entropies again")
    return note


def _read_values(path: Path, count: int) -> np.ndarray:
    """Map the values into memory."""
    try:
        values = np.load(path, mmap_mode="r")
    except Exception as error:  # NumPy parses the header as Python, and raises what that does
        raise ValueError(
            f"{path} is no .npy file that can be read: {' '.join(str(error).split())}"
        ) from error
    if (values.shape, values.dtype) != ((count,), np.dtype(np.float32)):
        raise ValueError(
            f"{path} holds {values.dtype} of shape {values.shape}, expected float32 of shape {(count,)}, one for each "
            "byte and BOS of each document: write the entropies again"
        )
    return values
