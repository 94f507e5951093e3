"""The launch of the Hopper kernels, a program for each channel and group of its rows, and the load of constants."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import vary_alike
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel


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
    """Run `program` over a grid of these axes, and return its results.

    It is given refs of `arrays`, results and `scratch`.

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
        compiler_params=LANE,
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name=f"long_conv_{name}",
    )
    return kernel(*vary_alike(*arrays))


def load_constants(
    worker: Any, matrices: Sequence[tuple[Any, Any]], vectors: Sequence[tuple[Any, Any]], ready: Any
) -> None:
    """Copy what all warpgroups of a program read, by the first of them.

    Sources go to places, and `ready` tells when.

    Args:
      worker: number of the warpgroup.
      matrices: several in each source, copied one by one.
      vectors: copied whole.
      ready: expects an arrival for each copy.
    """

    @pl.when(worker == 0)
    def _() -> None:
        for source, place in matrices:
            for i in range(place.shape[0]):
                plgpu.copy_gmem_to_smem(source.at[i], place.at[i], ready)
        for source, place in vectors:
            plgpu.copy_gmem_to_smem(source, place, ready)
