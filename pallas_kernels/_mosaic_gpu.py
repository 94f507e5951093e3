"""How Hopper kernels are started, so that a process compiles each of them once."""

import os
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

NUMBERED = "mosaic_gpu.dump_basename"
"""Attribute of a kernel's module: the name of the files that it is dumped to."""

DUMPS = "MOSAIC_GPU_DUMP_TO"
"""Environment variable with the folder of such files."""


def mosaic_kernel(program: Callable[..., None], *, interpret: Any, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel` of a program whose module is the same wherever it is lowered.

    JAX compiles modules of the same bytes once a process, and all modules one after another. But it writes a running
    number into each, so no two are the same: a kernel would be compiled again where a forward pass is rematerialised,
    in each layer outside a scan, and in each program. A persistent cache would not find programs either that were
    lowered in another order.

    Args:
      program: the kernel's body.
      interpret: parameters of Pallas' simulation, or None for a GPU.
      options: of `plgpu.kernel`.
    """

    def unnumbered(*refs: Any, **scratch: Any) -> None:
        _name_after_kernel()
        program(*refs, **scratch)

    # Keep the numbers of kernels that are dumped into a folder: files of one name replace each other.
    numbered = interpret or DUMPS in os.environ
    return plgpu.kernel(program if numbered else unnumbered, interpret=interpret, **options)


def _set_name(launch: Any) -> None:
    """JAX numbers a module only if it has no such name yet; no instruction is added."""
    attributes = launch.module.operation.attributes
    attributes[NUMBERED] = attributes["sym_name"]


_name_after_kernel: Any = plgpu.inline_mgpu()(_set_name)
