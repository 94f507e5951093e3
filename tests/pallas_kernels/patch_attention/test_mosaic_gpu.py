"""The Hopper kernels: simulated on the CPU, on a GPU what of the suite one device can run, and what they refuse.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels._dispatch import Device
from pallas_kernels.patch_attention import bench, lookup, mosaic_gpu, pool
from pallas_kernels.patch_attention.hopper import why_not
from pallas_kernels.patch_attention.shapes import SHAPES, PatchShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.patch_attention.cases import kernel_lookups, kernel_pools, pool_arrays

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
BF16 = jnp.bfloat16


SIMULATED = (
    *kernel_pools(partial(mosaic_gpu.pool, interpret=True)),
    *kernel_lookups(partial(mosaic_gpu.lookup, interpret=True)),
)
ON_A_GPU = (
    *kernel_pools(partial(pool, implementation="mosaic_gpu")),
    *kernel_lookups(partial(lookup, implementation="mosaic_gpu")),
)


@pytest.mark.parametrize("case", SIMULATED, ids=str)
def test_simulated(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.parametrize("case", [SIMULATED[0], SIMULATED[3]], ids=str)
def test_what_is_not_visible_is_not_read(case: OpCase) -> None:
    op_suite.check_poison(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [SIMULATED[0], SIMULATED[3]], ids=str)
def test_simulated_under_vmap(case: OpCase) -> None:
    op_suite.check_vmap(case)


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": Device("gpu", (10, 0), "NVIDIA B200")}, "9.0 exactly (H100, H200), this is NVIDIA B200"),
        ({"device": Device("cpu")}, "this is cpu"),
        ({"dtype": jnp.float32}, "q, k and v are float32"),
        ({"width": 128}, "heads are of size 64, not 128"),
        ({"look_back": 9}, "8 patches at most, not 9"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {"device": HOPPER, "dtype": BF16, "width": 64, "look_back": 8} | change
    q = jax.ShapeDtypeStruct((1, 2, 100, 4, call["width"]), call["dtype"])
    assert reason in (why_not(call["device"], q, look_back=call["look_back"]) or "it can run")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: PatchShape) -> None:
    full = (shape.batch, shape.blocks, shape.block_size, shape.heads, shape.head_dim)
    assert why_not(HOPPER, jax.ShapeDtypeStruct(full, BF16), look_back=shape.look_back) is None


def test_cannot_be_asked_for_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="this is cpu"):
        pool(**pool_arrays(), implementation="mosaic_gpu")
    assert why_not(HOPPER) is None


@pytest.mark.parametrize("direction", ["pool", "lookup"])
def test_the_benchmark_passes_its_gate(direction: Any) -> None:
    shape = PatchShape("tiny", 1, 2, 96, 24, 2, 64, 3)
    ids = bench.patch_ids(shape)
    assert set(np.diff(ids, axis=-1).flat) == {0, 1}
    assert (ids[..., -1] < shape.capacity - 1).any()
    plan = bench.plan(bench.Direction("tiny", direction, shape), interpret=True)
    assert set(check(plan, jax.random.key(0))) == {"plain", "triton", "xla", "mosaic_gpu", "dense"}
