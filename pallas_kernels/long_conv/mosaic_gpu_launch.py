"""How the Hopper kernels are started: a program for each channel and group of its rows, or as axes say."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import vary_alike
from pallas_kernels._mosaic_gpu import mosaic_kernel


def launch(
    program: Callable[..., None],
    arrays: Sequence[Any],
    out_type: Any,
    scratch: Any,
    *,
    grid: tuple[int, int],
    workers: int,
    name: str,
    interpret: bool,
    axes: tuple[str, str] = ("channel", "rows"),
) -> Any:
    """Results of `program` over a grid of these axes, which is given refs of `arrays`, results and `scratch`.

    Args:
      workers: warpgroups of a program.
      interpret: simulate a GPU on the CPU, and watch for races.
    """
    kernel: Any = mosaic_kernel(
        program,
        out_type=out_type,
        grid=grid,
        grid_names=axes,
        num_threads=workers,
        thread_name="warpgroup",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name=f"long_conv_{name}",
    )
    return kernel(*vary_alike(*arrays))
