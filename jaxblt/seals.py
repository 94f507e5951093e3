"""Seals of files: a hash of arrays and text that stands among the text, so that a changed bit is an error.

Below all rooms: only numpy is imported. Checkpoints have checks of their own (`jaxblt.training.stored.integrity`).
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

MARK, HASH = "sealed", "sha256"
"""The entries of a seal. There are two, so that a flipped bit in the name of one does not take the seal away."""
FORM = "1"
"""The value of the mark: how the hash is made."""


class UnsealedWarning(UserWarning):
    """A file of an earlier version, in which changed bits go unnoticed."""


def seal(arrays: Mapping[str, np.ndarray], text: Mapping[str, Any], *, beside: Any = None) -> dict[str, Any]:
    """Return `text` with a seal on the arrays, the text, and what stands `beside` them.

    Args:
      arrays: by name.
      text: by name; values that JSON holds.
      beside: what JSON holds.

    Raises:
      ValueError: an array has a number that is not finite, and nothing would read the file.
    """
    check_finite("what is to be written", arrays)
    return {**text, MARK: FORM, HASH: _digest(arrays, text, beside)}


def check_seal(
    file: Any, arrays: Mapping[str, np.ndarray], text: Mapping[str, Any], *, beside: Any = None, ours: bool
) -> None:
    """Check that a file holds what was sealed, and finite numbers.

    Files without a seal are only checked for finite numbers.

    Args:
      file: for messages.
      arrays, text, beside: as read, all of them.
      ours: whether only jaxblt writes such files, so that one without a seal is of an earlier version.

    Raises:
      ValueError: a bit has changed since the file was written, or a number is not finite.

    Warns:
      UnsealedWarning: a file of an earlier version has no seal.
    """
    if MARK in text or HASH in text:
        sealed = {name: value for name, value in text.items() if name not in (MARK, HASH)}
        if (text.get(MARK), text.get(HASH)) != (FORM, _digest(arrays, sealed, beside)):
            raise ValueError(
                f"{file} is not what was written: its {HASH} is another one; copy it again, or write it anew"
            )
    elif ours:
        warnings.warn(
            f"{file} is of an earlier version and has no hash, so changed bits go unnoticed: write it anew",
            UnsealedWarning,
            stacklevel=3,
        )
    check_finite(str(file), arrays)


def check_finite(where: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Check that all numbers of the arrays are finite.

    Raises:
      ValueError: one is NaN or infinite; names the array and the place.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in "biu" and not (finite := np.isfinite(array)).all():
            place = np.unravel_index(int(np.argmin(finite)), array.shape)
            raise ValueError(
                f"{where}: {name} holds {array[place]} at {[int(i) for i in place]}, expected finite numbers: take an "
                "earlier step of the run, or the file's source"
            )


def _digest(arrays: Mapping[str, np.ndarray], text: Mapping[str, Any], beside: Any) -> str:
    """Return the SHA-256 of the text as JSON, and of the arrays.

    Names, dtypes, shapes and bytes of the arrays count.
    """
    digest = hashlib.sha256(json.dumps([text, beside], sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()
