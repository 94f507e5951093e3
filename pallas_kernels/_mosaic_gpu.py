"""The start of Hopper kernels, lowered once a program and compiled once a process, and the layout of their tiles."""

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import ask_ptxas_once

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
"""Compiler parameters under which buffers may have a pitch of their own."""

APPROXIMATE = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
"""The same, with the GPU's own exponentials and quotients."""

ROW = 128
"""Bytes of a row of a swizzled tile."""

NUMBERED = "mosaic_gpu.dump_basename"
"""Attribute of a kernel's module: the name of the files that it is dumped to."""

DUMPS = "MOSAIC_GPU_DUMP_TO"
"""Environment variable with the folder of such files."""


def mosaic_kernel(program: Callable[..., None], *, interpret: Any, **options: Any) -> Callable[..., Any]:
    """Return `plgpu.kernel` of a program, traced and lowered once a program of XLA.

    It is compiled once a process. JAX compiles modules of the same bytes once, those of one program of XLA one after
    another. But it writes a running number into each module, so no two are the same. A kernel would be compiled again
    for each layer outside a scan, where a forward pass is rematerialised, and in each program. A persistent cache would
    not find programs either that were lowered in another order.

    Args:
      program: the kernel's body, or a `partial` of it with hashable arguments. What it reads besides, as constants of a
        module, is that of the first call.
      interpret: parameters of Pallas' simulation, or None for a GPU.
      options: of `plgpu.kernel`; their leaves are hashable.
    """
    if interpret:
        return plgpu.kernel(program, interpret=interpret, **options)
    given: Any = program if isinstance(program, partial) else partial(program)
    leaves, tree = jax.tree.flatten(options)
    # Keep the numbers of kernels that are dumped into a folder: files of one name replace each other.
    numbered = DUMPS in os.environ
    return _shared(given.func, given.args, tuple(given.keywords.items()), tuple(leaves), tree, numbered)


def tile_ref(*shape: int, dtype: Any) -> Any:
    """Return scratch for tiles that tensor cores read or the copy engine moves.

    They lie in the order that both want.
    """
    tiling: Any = plgpu.TilingTransform((8, ROW // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzle: Any = plgpu.SwizzleTransform(ROW)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


@lru_cache(maxsize=1024)
def _shared(
    function: Callable[..., None],
    args: tuple[Any, ...],
    keywords: tuple[tuple[str, Any], ...],
    leaves: tuple[Any, ...],
    tree: Any,
    numbered: bool,
) -> Callable[..., Any]:
    """Return one function for equal kernels.

    jit traces it once for arguments of the same types.
    """

    def program(*refs: Any, **scratch: Any) -> None:
        if not numbered:
            _name_after_kernel()
        function(*args, *refs, **dict(keywords), **scratch)

    ask_ptxas_once()
    return jax.jit(plgpu.kernel(program, **jax.tree.unflatten(tree, leaves)))


def _set_name(launch: Any) -> None:
    """Name the module, which JAX numbers only if it has no such name yet.

    No instruction is added.
    """
    attributes = launch.module.operation.attributes
    attributes[NUMBERED] = attributes["sym_name"]


_name_after_kernel: Any = plgpu.inline_mgpu()(_set_name)
