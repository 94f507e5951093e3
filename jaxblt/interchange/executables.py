"""A program as XLA has compiled it for one kind of device: opened, it compiles nothing.

The file is a zip archive, uncompressed. XLA is the only compiler here; nothing is of TensorRT.

| entry | holds |
|---|---|
| `about.json` | what `program_file` says of the program, the numbers of rows, the device and the versions |
| `rows_8.bin` | the executable for 8 rows, as `jax.experimental.serialize_executable` stores it |
| `params.safetensors` | the arguments before the records, by name |

An executable runs with the JAX and on the kind of device that it was compiled with. JAX stores it as a pickle, which
can run anything when it is opened: open only files that you trust.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jaxtyping import Array

from jaxblt.interchange.program_file import ABOUT, PARAMS, check_answer, lay_records
from jaxblt.interchange.programs import Made
from jaxblt.interchange.tensors import check_new, pack_tensors, unpack_tensors
from jaxblt.outputs import whole_file
from jaxblt.profiling.provenance import cpu_model, package_versions
from jaxblt.show import show
from jaxblt.training.stored.safe_files import one_line
from jaxblt.validation import whole

FORMAT = "jaxblt executables"
PACKAGES = ("jax", "jaxlib")
"""Packages whose versions must be those that compiled."""


@dataclass(frozen=True, eq=False)
class Executables:
    """Executables of one program for several numbers of rows; call it with records.

    Attributes:
      about: what the file says of them.
      arrays: the parameters by name.
      calls: the executables by rows, ascending.
    """

    about: Mapping[str, Any]
    arrays: dict[str, Array] = field(repr=False)
    calls: Mapping[int, Any] = field(repr=False)

    __repr__ = show

    @property
    def most_records(self) -> int:
        """The most records of a call."""
        return max(self.calls)

    def __call__(self, records: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Answer with a row for each record, by the smallest executable that holds them.

        Raises:
          ValueError: there are more records than `most_records`, or as of `Program`.

        Warns:
          PatchOverflowWarning: blocks have fewer slots than these records ask for.
        """
        if len(records) > self.most_records:
            raise ValueError(
                f"{len(records)} records were given, expected at most {self.most_records}, the largest batch that was "
                "compiled: give them in parts, or compile a larger one"
            )
        rows = next(count for count in self.calls if count >= len(records))
        found = self.calls[rows](self.arrays, *lay_records(self.about, records, rows))
        return check_answer(self.about, jax.device_get(found), len(records))


def write_executables(
    made: Made, file: str | os.PathLike[str], rows: Sequence[int], *, overwrite: bool = False
) -> int:
    """Compile a program for each number of rows, for the devices that are here, and write all to one file.

    Args:
      made: of `make_score_program` or `make_embed_program`, lowered for this kind of device.
      file: to write, whole or not at all.
      rows: of the batches.
      overwrite: the file may be there.

    Returns:
      The file's bytes.

    Raises:
      FileExistsError: the file is there, and is not to be overwritten.
      ValueError: there is no number of rows, or one is below 1.
    """
    check_new(file, overwrite=overwrite)
    if not rows:
        raise ValueError("rows are (), expected the batches to compile for, such as (1, 8)")
    for count in rows:
        whole("rows", count, least=1)
    compiled = {count: _compile(made, count) for count in sorted(set(rows))}
    about = {"format": FORMAT, **made.about, "rows": list(compiled), "outputs": _outputs(made)}
    about |= {"compiler": "XLA", "device": _device(), "versions": package_versions(("jaxblt", *PACKAGES))}
    with whole_file(file) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(ABOUT, json.dumps(about, indent=2))
        archive.writestr(PARAMS, pack_tensors(made.arrays))
        for count, executable in compiled.items():
            archive.writestr(_entry(count), executable)
    return Path(file).stat().st_size


def read_executables(file: str | os.PathLike[str]) -> Executables:
    """Open what `write_executables` wrote; nothing is compiled, and no run is needed.

    Open only files that you trust: executables are pickles.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is none of `write_executables`, or of another device or JAX.
    """
    if not Path(file).exists():
        raise FileNotFoundError(f"{file} does not exist: expected a file of jaxblt export --executables")
    try:
        with zipfile.ZipFile(file) as archive:
            about = json.loads(archive.read(ABOUT))
            _check_here(about)
            stored = unpack_tensors(archive.read(PARAMS))
            executables = {count: archive.read(_entry(count)) for count in about["rows"]}
        arrays, here = jax.device_put(stored), jax.devices()[:1]
        given = jax.tree.structure(((arrays, 0, 0), {}))
        returned = jax.tree.structure(dict.fromkeys(about["outputs"], 0))
        calls = {
            count: serialize_executable.deserialize_and_load(
                executable, given, returned, execution_devices=here
            )
            for count, executable in executables.items()
        }
    except (zipfile.BadZipFile, KeyError, ValueError, pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(f"{file} holds no executables for here: {one_line(error)}") from error
    return Executables(about, arrays, calls)


def _entry(rows: int) -> str:
    return f"rows_{rows}.bin"


def _compile(made: Made, rows: int) -> bytes:
    """Return the executable for so many rows."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made.arrays)
    records = jax.ShapeDtypeStruct((rows, made.about["most_bytes"]), jnp.uint8)
    lowered = jax.jit(made.exported.call).lower(shapes, records, jax.ShapeDtypeStruct((rows,), jnp.int32))
    return serialize_executable.serialize(lowered.compile())[0]


def _outputs(made: Made) -> list[str]:
    exported = made.exported
    return sorted(jax.tree.unflatten(exported.out_tree, exported.out_avals))


def _device() -> dict[str, str]:
    device = jax.devices()[0]
    # Name a CPU's model: JAX calls all of them "cpu", and one may lack instructions of another
    kind = cpu_model() if device.platform == "cpu" else device.device_kind
    return {"platform": device.platform, "kind": kind}


def _check_here(about: Mapping[str, Any]) -> None:
    if about.get("format") != FORMAT:
        raise ValueError(f"its format is {about.get('format')!r}, expected {FORMAT!r}")
    versions = package_versions(PACKAGES)
    for what, stored, here in (
        ("device", about["device"], _device()),
        *((name, about["versions"][name], versions[name]) for name in PACKAGES),
    ):
        if stored != here:
            raise ValueError(f"its {what} is {stored}, here it is {here}: compile it again")
