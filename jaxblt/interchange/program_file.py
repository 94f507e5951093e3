"""A program as one file: a zip archive, uncompressed, of the program, its parameters and what they are.

| entry | holds |
|---|---|
| `about.json` | the question, its options, names of the arguments in order, platforms, versions |
| `program.bin` | the program as `jax.export.deserialize` reads it |
| `program.stablehlo` | the same as StableHLO bytecode, for programs other than JAX |
| `params.safetensors` | the arguments before the records, by name |
"""

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array

from jaxblt.interchange.programs import Made
from jaxblt.interchange.tensors import check_new, pack_tensors, unpack_tensors
from jaxblt.outputs import whole_file
from jaxblt.patching import warn_overflow
from jaxblt.profiling.provenance import package_versions
from jaxblt.show import show
from jaxblt.training.stored.safe_files import one_line

INSTALL = "which comes with pip install 'jaxblt[export]'"
FORMAT = "jaxblt program"
ABOUT, PROGRAM, STABLEHLO, PARAMS = "about.json", "program.bin", "program.stablehlo", "params.safetensors"


@dataclass(frozen=True, eq=False)
class Program:
    """A program that was read from a file; call it with records.

    Attributes:
      about: what the file says of it.
      exported: as `jax.export` reads it.
      arrays: its parameters by name.
    """

    about: Mapping[str, Any]
    exported: export.Exported
    arrays: dict[str, Array] = field(repr=False)

    __repr__ = show

    def __call__(self, records: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Answer with a row for each record.

        It compiles once for each number of records.

        Raises:
          ValueError: there is no record; one is empty, or longer than a row; or an answer is not finite.

        Warns:
          PatchOverflowWarning: blocks have fewer slots than these records ask for.
        """
        rows, sizes = lay_records(self.about, records)
        return check_answer(self.about, jax.device_get(self._run(self.arrays, rows, sizes)), len(records))

    @cached_property
    def _run(self) -> Any:
        return jax.jit(self.exported.call)


def lay_records(
    about: Mapping[str, Any], records: Sequence[bytes], rows: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return records as the rows of a program, and their lengths; `rows` of them, empty ones last.

    Raises:
      ValueError: there is no record, or one is empty, or longer than a row.
    """
    most = about["most_bytes"]
    if not records:
        raise ValueError("no records were given: expected at least one")
    laid = np.zeros((rows or len(records), most), np.uint8)
    sizes = np.zeros(len(laid), np.int32)
    for i, record in enumerate(records):
        if not isinstance(record, bytes) or not 0 < len(record) <= most:
            told = f"{len(record)} bytes" if isinstance(record, bytes) else f"a {type(record).__name__}"
            raise ValueError(
                f"record {i} is {told}, expected 1 to {most} bytes, as many as a row of the program holds: export "
                "one with a larger length"
            )
        laid[i, : len(record)], sizes[i] = np.frombuffer(record, np.uint8), len(record)
    return laid, sizes


def check_answer(about: Mapping[str, Any], found: dict[str, Any], count: int) -> dict[str, np.ndarray]:
    """Return the rows of `count` records, if all are finite; warn of boundaries that were refused."""
    found = {name: rows[:count] for name, rows in found.items()}
    for i in range(count):
        if not all(np.isfinite(x[i]).all() for x in found.values()):
            raise ValueError(f"the answer for record {i} is not finite: the parameters overflow on its bytes")
    if "refused" in found and about["patches"]:
        refused, wanted = float(found["refused"].sum()), float(found["wanted"].sum())
        warn_overflow(refused, wanted, **about["patches"])
    return found


def write_program(made: Made, file: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write a program to one file, whole or not at all. Returns the file's bytes.

    Raises:
      FileExistsError: the file is there, and is not to be overwritten.
      FileNotFoundError: its folder is not.
      ValueError: the program holds a custom call that JAX keeps no version of.
    """
    check_new(file, overwrite=overwrite)
    try:
        program = bytes(made.exported.serialize())
    except ImportError as error:
        raise ImportError(f"{one_line(error)}: a program is stored by flatbuffers, {INSTALL}") from error
    except ValueError as error:
        raise ValueError(f"the program cannot be stored: {one_line(error)}") from error
    about = {"format": FORMAT, **made.about, "versions": package_versions(("jaxblt", "jax", "jaxlib"))}
    entries = {
        ABOUT: json.dumps(about, indent=2).encode(),
        PROGRAM: program,
        STABLEHLO: made.exported.mlir_module_serialized,
        PARAMS: pack_tensors(made.arrays),
    }
    with whole_file(file) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return Path(file).stat().st_size


def read_program(file: str | os.PathLike[str]) -> Program:
    """Read a program that `write_program` wrote; no model is built and no run is needed.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is none of `write_program`, or this version of JAX cannot read it.
    """
    if not Path(file).exists():
        raise FileNotFoundError(f"{file} does not exist: expected a program of jaxblt export --stablehlo")
    try:
        with zipfile.ZipFile(file) as archive:
            about = json.loads(archive.read(ABOUT))
            if about.get("format") != FORMAT:
                raise ValueError(f"its format is {about.get('format')!r}, expected {FORMAT!r}")
            exported = export.deserialize(bytearray(archive.read(PROGRAM)))
            stored = unpack_tensors(archive.read(PARAMS))
    except ImportError as error:
        raise ImportError(f"{one_line(error)}: a program is read by flatbuffers, {INSTALL}") from error
    except Exception as error:
        raise ValueError(f"{file} is no program that can be read: {one_line(error)}") from error
    return Program(about, exported, {name: jnp.asarray(x) for name, x in stored.items()})
