"""A Hopper kernel is lowered once a program, and to the same module in each, so that a process compiles it once."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels._mosaic_gpu import DUMPS, mosaic_kernel

TILE = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def _copy(source: Any, target: Any, tile: Any, arrived: Any, *, times: int) -> None:
    plgpu.copy_gmem_to_smem(source, tile, arrived)
    plgpu.barrier_wait(arrived)
    for _ in range(times):
        plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0)


def _copied(x: Any, *, times: int = 1, interpret: Any = None) -> Any:
    return mosaic_kernel(
        partial(_copy, times=times),
        out_type=TILE,
        scratch_types=[plgpu.SMEM(TILE.shape, TILE.dtype), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="copied",
    )(x)


def _kernels(run: Any) -> list[str]:
    """Hashes by which JAX knows the kernels that were lowered for a program again."""
    text = jax.jit(lambda x: run(x)).trace(TILE).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r'kernel_hash = "(.*?)",', text)


def _twice(x: Any) -> Any:
    with jax.named_scope("layer"):
        x = _copied(x)
    return _copied(x + 1)


def test_a_kernel_is_lowered_once_a_program_and_the_same_in_each() -> None:
    (one,) = _kernels(_twice)
    assert _kernels(_copied) == [one]


def test_a_kernel_with_other_arguments_is_another_one() -> None:
    kernels = _kernels(lambda x: _copied(x) + _copied(x, times=2))
    assert len(set(kernels)) == 2


def test_kernels_that_are_dumped_keep_their_numbers(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(DUMPS, str(tmp_path))
    assert _kernels(_twice) != _kernels(_copied)


def _signs(source: Any, target: Any) -> None:
    target[0] = jnp.sign(source[0].astype(jnp.int32)).astype(jnp.float32)


def test_lowering_asks_for_the_version_of_ptxas_once(monkeypatch) -> None:
    asked = []
    extension = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(1) or 90)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", SimpleNamespace(_mosaic_gpu_ext=extension))
    run = mosaic_kernel(_signs, interpret=None, out_type=TILE, kernel_name="signs")
    assert _kernels(run)
    assert asked == [1]


def test_a_simulated_kernel_runs() -> None:
    x = jnp.arange(TILE.size, dtype=TILE.dtype).reshape(TILE.shape)
    run = jax.jit(partial(_copied, interpret=plgpu.InterpretGPUParams()))
    np.testing.assert_array_equal(run(x), x)


def test_every_kernel_is_started_so() -> None:
    folder = Path(pallas_kernels.__file__).parent
    found = [
        path.name for path in folder.rglob("*.py") if "plgpu.kernel(" in path.read_text(encoding="utf-8")
    ]
    assert found == ["_mosaic_gpu.py"]
