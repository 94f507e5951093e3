"""Compiled train steps that outlive a process: a start that finds its own traces no step.

A step is found by a hash of all that its program is made from, so one of other code or shapes is never taken. Its
folder is trusted as that of compiled programs beside it is: executables are pickles.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
from jax.experimental import serialize_executable

import pallas_kernels
from jaxblt import process_start
from jaxblt.outputs import whole_file
from jaxblt.profiling.provenance import PACKAGES, cpu_model, package_versions
from jaxblt.remote.urls import url_of
from jaxblt.training.start.setup import Setup
from jaxblt.training.start.startup import cache_folder
from jaxblt.training.stored.safe_files import read_json, replace_text
from jaxblt.training.stored.serialize import CLASS, encode
from pallas_kernels.runtime import current_device, has_checked_ops, has_reference_ops

VARIABLES = ("XLA_", "TF_XLA_", "LIBTPU_", "NVIDIA_", "CUBLAS", "CUDNN", "JAXBLT_", "MOSAIC_", "TRITON_")
"""Beginnings of variables that compilers read."""
VERSIONS = (*PACKAGES, "jax-linear-attention", "triton")
"""Packages that a program is made by."""
MOST_BYTES = 1 << 20
"""Of what is told of a step."""
STEP = "step.bin"
"""The executable with the names of its metrics, behind their SHA-256."""
MOST_KEPT = 16
"""Steps that are kept, the last ones that were used: each takes tens of megabytes, and every change makes another."""


@dataclass(frozen=True)
class KeptStep:
    """What processes leave of a step for later ones.

    Attributes:
      place: a folder; None if nothing is kept.
      devices: that it runs on.
      given: shapes and shardings of its arguments.
    """

    place: Path | None
    devices: list[Any]
    given: tuple[Any, ...]

    @classmethod
    def of(cls, setup: Setup, given: tuple[Any, ...]) -> Self:
        """Return the place of a run's step on a state and a batch.

        Nothing is kept without a cache of compiled programs on a disk, of several processes, of a recipe with code from
        elsewhere than jaxblt, of which no hash is known, nor if a source has changed since this process began.
        """
        folder, devices = cache_folder(setup.recipe.train.compilation_cache), list(setup.mesh.devices.flat)
        if folder is None or url_of(folder) or jax.process_count() > 1 or not _is_ours(encode(setup.recipe)):
            return cls(None, devices, given)
        sources = _sources()
        place = None if sources is None else Path(folder) / "steps" / _key(setup, given, sources)
        return cls(place, devices, given)

    @property
    def is_there(self) -> bool:
        """Whether an earlier process kept the executable."""
        return self.place is not None and (self.place / STEP).is_file()

    def told[T](self, what: str, find: Callable[[], T]) -> T:
        """Return what an earlier process found of the step, as JSON has it; else find it, and keep it.

        Args:
          what: its name.
          find: makes it.
        """
        if self.place is None:
            return find()
        file = self.place / f"{what}.json"
        try:
            return read_json(file, self.place, most=MOST_BYTES)
        except (OSError, ValueError):
            found = find()
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(found))
            for old in sorted(self.place.parent.iterdir(), key=os.path.getmtime)[:-MOST_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError:
            pass  # A disk that takes none loses nothing but time
        return found

    def load(self) -> Callable[..., Any] | None:
        """Return the executable that an earlier process kept. One that does not run here is removed: None."""
        assert self.place is not None
        file = self.place / STEP
        try:
            stored = file.read_bytes()
            if hashlib.sha256(stored[32:]).digest() != stored[:32]:
                raise ValueError("the file is damaged")
            names, packed = pickle.loads(stored[32:])
            with contextlib.suppress(OSError):
                os.utime(self.place)
            returned = jax.tree.structure((self.given[0], dict.fromkeys(names, 0)))
            return serialize_executable.deserialize_and_load(
                packed, jax.tree.structure((self.given, {})), returned, execution_devices=self.devices
            )
        except Exception:  # What an unlike machine or version raises is not known
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            return None

    def keep(self, compiled: Any) -> None:
        """Keep an executable for the processes to come, where it can be kept."""
        if self.place is None:
            return
        state, metrics = jax.tree.unflatten(compiled.out_tree, range(compiled.out_tree.num_leaves))
        if jax.tree.structure(state) != jax.tree.structure(self.given[0]):
            return
        try:
            packed = pickle.dumps((list(metrics), serialize_executable.serialize(compiled)[0]))
            with whole_file(self.place / STEP) as partial:
                partial.write_bytes(hashlib.sha256(packed).digest() + packed)
        except Exception:  # No disk, or a program that cannot be stored
            return


def _is_ours(tree: Any) -> bool:
    """Return whether all classes of an encoded config are jaxblt's: those from elsewhere are named "module:Name"."""
    return all(":" not in name or name.startswith("jaxblt.") for name in _classes(tree))


def _classes(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        yield from (tree[CLASS],) if CLASS in tree else ()
        tree = [value for name, value in tree.items() if name != CLASS]
    if isinstance(tree, list):
        for value in tree:
            yield from _classes(value)


def _key(setup: Setup, given: tuple[Any, ...], sources: str) -> str:
    """Return the SHA-256 of what a step's program is made from."""
    first, shapes = setup.mesh.devices.flat[0], jax.tree_util.tree_leaves_with_path(given)
    told: list[Any] = [encode(setup.recipe), sources, package_versions(VERSIONS)]
    told += [{name: getattr(jax.config, name, held) for name, held in sorted(jax.config.values.items())}]
    told += [{name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}]
    told += [first.client.platform_version, cpu_model() if first.platform == "cpu" else first.device_kind]
    told += [[device.id for device in setup.mesh.devices.flat], str(setup.mesh)]
    told += [has_reference_ops(), has_checked_ops(), str(current_device())]
    told += [(jax.tree_util.keystr(path), str(x.shape), str(x.dtype), str(x.sharding)) for path, x in shapes]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()


def _sources() -> str | None:
    """Return the SHA-256 of the Python files of jaxblt and of its kernels; None if one changed after it was read."""
    digest = hashlib.sha256()
    for module in (process_start, pallas_kernels):
        root = Path(str(module.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            if file.stat().st_ctime > process_start.BEGAN:
                return None
            text = file.read_bytes()
            digest.update(f"{file.relative_to(root)} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()
