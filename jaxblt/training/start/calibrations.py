"""Calibrations that outlive a process, by a hash of all that they depend on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.patching import PatcherConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import ENTROPY, Frozen
from jaxblt.training.stored.safe_files import read_json, replace_text
from jaxblt.training.stored.serialize import to_json

VERSION = 1
"""Raise it if calibration changes, so that older files are not read."""
MOST_BYTES = 1 << 16
FOUND = ("threshold", "margin", "capacity")


def calibration_key(recipe: Recipe, batches: Sequence[Batch], frozen: Mapping[str, Frozen]) -> str:
    """Return the SHA-256 of what a calibration depends on.

    That is the sample's bytes, the entropy model, the recipe without its run's length, JAX and the type of device.
    """
    digest = hashlib.sha256()
    tree = frozen.get(ENTROPY)
    kind = jax.local_devices()[0].device_kind
    told = [VERSION, jax.__version__, kind, None if tree is None else tree.content_hash]
    told += [to_json(part) for part in (recipe.model, recipe.entropy_model, recipe.data, recipe.patcher)]
    told += [recipe.bytes_per_patch, recipe.train.dtype]
    digest.update(json.dumps(told).encode())
    for leaf in jax.tree.leaves(list(batches)):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def read_calibration(file: Path, patcher: PatcherConfig | None) -> PatcherConfig | None:
    """Return the patcher with what the file says; None if there is no file, or it is no calibration of this patcher."""
    try:
        stored: Any = read_json(file, file.parent, most=MOST_BYTES)
        return replace(patcher, **{name: stored[name] for name in FOUND})  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_calibration(file: Path, patcher: PatcherConfig) -> None:
    """Write what was found; a disk that takes none loses nothing but time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps({name: getattr(patcher, name) for name in FOUND}))
    except OSError:
        return
