"""A run's parameters as one file that other programs read: jaxblt export RUN_DIR FILE.safetensors."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from jaxblt.cli.parsing import parse
from jaxblt.remote import refuse_remote
from jaxblt.validation import whole

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
ALIGNMENT = 8


def export(
    run_dir: Annotated[str, tyro.conf.Positional],
    file: Annotated[str, tyro.conf.Positional],
    step: int | None = None,
) -> None:
    """Writes a checkpoint's parameters in the safetensors format, without the optimiser.

    Names are paths, such as model.embed.byte.embedding; frozen trees, such as the entropy model, begin with
    frozen.NAME. The recipe with its threshold, as JSON, and the step are in the file's metadata.

    Args:
      run_dir: folder of the run.
      file: to write; a file that exists is never overwritten.
      step: of the checkpoint; the newest by default.

    Raises:
      FileNotFoundError: the folder holds no run, or no checkpoint of that step.
      FileExistsError: the file is there.
    """
    import jaxblt

    if step is not None:
        whole("--step", step, least=0)
    refuse_remote("FILE", file)
    if Path(file).exists():
        raise FileExistsError(f"{file} is there already, and nothing is overwritten: choose another name")
    if not Path(file).absolute().parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {str(Path(file).parent)!r}")
    run = jaxblt.load(run_dir, step=step)
    trees = {"model": run.params, "frozen": {name: tree.params for name, tree in run.frozen.items()}}
    paths, _ = jax.tree_util.tree_flatten_with_path(trees)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in paths}
    metadata = {"format": "jaxblt", "recipe": run.recipe.to_json(), "step": str(run.step)}
    size = write_safetensors(file, arrays, metadata)
    print(f"wrote {file}: {len(arrays)} arrays of step {run.step}, {size:,} bytes")


def write_safetensors(file: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """Writes arrays by name: the header's length, the header as JSON, then their bytes in C order. Returns the size.

    Raises:
      ValueError: the format has no such dtype.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise ValueError(f"{name} is {array.dtype.name}, expected one of {', '.join(DTYPES)}")
        start, end = end, end + array.nbytes
        kind = DTYPES[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    partial = Path(f"{file}.partial{os.getpid()}")
    try:
        with partial.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for array in arrays.values():
                out.write(np.ascontiguousarray(array).tobytes())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return 8 + len(text) + end


def main(argv: Sequence[str]) -> None:
    """Parses and writes."""
    parse(export, argv, prog="jaxblt export")
