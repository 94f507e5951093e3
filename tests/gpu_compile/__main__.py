"""Compile `PROGRAMS` for an H200, print registers and spills, and compare them with `accepted.json`.

It fails if a program does not compile, or if a kernel spills more than accepted or is not listed there.
"""

import argparse
import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

# Read when JAX starts: it looks for no GPU, and ptxas reports on what it made for Mosaic and for XLA (Triton).
os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=3"}
# The same of jax-triton, whose PTX is compiled on the machine that runs it: where it is left.
os.environ |= {"JAX_TRITON_DUMP_DIR": tempfile.mkdtemp()}

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.profiling.targets import devices_of
from pallas_kernels._dispatch import compiling_for
from tests.gpu_compile.figures import Figures, complaints, read_report
from tests.gpu_compile.programs import AXIS, PROGRAMS, Program

HERE = Path(__file__).parent
ACCEPTED = HERE / "accepted.json"
TRITON = re.compile(r'name = "(\w+)", num_stages')
"""Names one of Pallas' Triton kernels in a compiled program."""
DUMPED = Path(os.environ["JAX_TRITON_DUMP_DIR"])
atexit.register(shutil.rmtree, DUMPED)


@contextmanager
def _captured() -> Iterator[list[str]]:
    """What C++ code of this process writes to standard output and error meanwhile, then the list's one item."""
    written: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = {number: os.dup(number) for number in (1, 2)}
        for number in kept:
            os.dup2(file.fileno(), number)
        try:
            yield written
        finally:
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            written.append(file.read().decode(errors="replace"))


def _assembled(ptx: Path) -> str:
    """What ptxas reports on a file."""
    spec = find_spec("nvidia.cu13")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("ptxas is not installed: pip install nvidia-cuda-nvcc")
    ptxas = Path(spec.submodule_search_locations[0]) / "bin" / "ptxas"
    command = [ptxas, "-v", "-arch=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
    return subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True).stderr


def compile_for_h200(program: Program) -> Figures:
    """Figures of the program's kernels, but for those that a program before it had: JAX compiles each once.

    Raises:
      RuntimeError: there is no Mosaic or Triton kernel in it.
    """
    mesh = Mesh(np.array(devices_of("h200", 4)[: program.devices]), (AXIS,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), program.shapes
    )
    known = _dumped()
    with _captured() as written, jax.set_mesh(mesh), compiling_for(mesh.devices.flat[0]):
        compiled = jax.jit(program.run).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    text, new = compiled.as_text() or "", _dumped() - known
    triton = set(TRITON.findall(text))
    if not triton and "mosaic_gpu" not in text and "triton_kernel_call" not in text:
        raise RuntimeError(f"{program.name}: there is no Mosaic or Triton kernel in it")
    reports = [*written, *map(_assembled, sorted(new))]
    return read_report("\n".join(reports), "sm_90a", triton | {ptx.stem for ptx in new})


def _dumped() -> set[Path]:
    return set(DUMPED.glob("*/*.ptx"))


def main() -> int:
    """Compiles all, prints a line each; 1 if there is a complaint."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_compile")
    parser.add_argument("--accept", action="store_true", help=f"write {ACCEPTED.name}")
    accept = parser.parse_args().accept
    figures: dict[str, Figures] = {}
    for program in PROGRAMS:
        start = time.perf_counter()
        figures[program.name] = compile_for_h200(program)
        kernels = [
            f"{kernel}: {f['registers']} registers, {f['spilled']} bytes spilled"
            for kernel, f in figures[program.name].items()
        ]
        seconds = time.perf_counter() - start
        print(f"{program.name:24s}{seconds:5.1f} s  {'; '.join(kernels) or 'kernels as above'}", flush=True)
    if accept:
        ACCEPTED.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    found = complaints(figures, json.loads(ACCEPTED.read_text(encoding="utf-8")))
    for line in found:
        print(line, file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
