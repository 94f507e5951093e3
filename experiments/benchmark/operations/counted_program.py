"""One version of an op on one shape, run under Nsight Compute by `counters`."""

import ctypes
import sys
from contextlib import suppress
from glob import glob
from importlib import import_module
from typing import Any

import jax

from jaxblt.profiling import Case, forward_backward

PASSES = ("forward", "forward+backward")


def case_of(op: str, shape: str, version: str, which: str) -> Case:
    """Return a version in the plan of an op's benchmark.

    Raises:
      ValueError: there is no such op, shape, version or pass.
    """
    from experiments.benchmark.operations.kernels import SHAPES

    if op not in SHAPES:
        raise ValueError(f"unknown op {op!r}, choose among {', '.join(SHAPES)}")
    if which not in PASSES:
        raise ValueError(f"unknown pass {which!r}, choose among {', '.join(PASSES)}")
    shapes = {s.name: s for s in import_module(f"pallas_kernels.{op}.shapes").SHAPES}
    if shape not in shapes:
        raise ValueError(f"{op} has no shape {shape!r}, choose among {', '.join(shapes)}")
    plan: Any = import_module(f"pallas_kernels.{op}.bench").plan(shapes[shape])
    cases = {case.name: case for case in (plan.plain, *plan.versions)}
    if version not in cases:
        raise ValueError(
            f"{op} has no version {version!r} of {shape} on {jax.devices()[0].device_kind}, choose among "
            f"{', '.join(cases)}"
        )
    return cases[version] if which == "forward" else forward_backward(cases[version], jax.random.key(0))


def cuda_runtime() -> ctypes.CDLL:
    """Load CUDA's runtime, from the system or from JAX's wheels.

    Raises:
      FileNotFoundError: there is none.
    """
    wheels = f"{sys.prefix}/lib/python3*/site-packages/nvidia/*/lib/libcudart.so*"
    places = ["libcudart.so", *glob("/usr/local/cuda*/lib64/libcudart.so"), *glob(wheels)]
    for place in places:
        with suppress(OSError):
            return ctypes.CDLL(place)
    raise FileNotFoundError("libcudart.so not found: install CUDA's runtime, or pip install 'jaxblt[cuda13]'")


def main(program: str) -> None:
    """Compile, run once, and run once more where the profiler looks.

    Raises:
      RuntimeError: the profiler does not listen.
    """
    case = case_of(*program.split(":"))
    run = jax.jit(case.fn).lower(*case.args).compile()
    jax.block_until_ready(run(*case.args))
    cuda = cuda_runtime()
    if error := cuda.cudaProfilerStart():
        raise RuntimeError(
            f"cudaProfilerStart returned {error}: run this by `experiments.benchmark counters`"
        )
    jax.block_until_ready(run(*case.args))
    cuda.cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1])
