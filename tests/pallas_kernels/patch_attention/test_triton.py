"""The Triton kernels: interpreted on the CPU, on a GPU what of the suite one device can run, and what they refuse."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels._bench import check
from pallas_kernels._dispatch import Device
from pallas_kernels.patch_attention import bench, lookup, pool, triton_gpu, triton_why
from pallas_kernels.patch_attention.shapes import SHAPES, PatchShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.patch_attention.cases import (
    kernel_lookups,
    kernel_pools,
    lookup_arrays,
    lookup_case,
    pool_arrays,
)

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")


def lookups(run: Any) -> list[OpCase]:
    """Also with bytes that see the patches of several programs whose windows move, at the least W and the most."""
    four, eight = (
        lookup_arrays(jnp.bfloat16, look_back=w, size=size, capacity=capacity, width=64)
        for w, size, capacity in ((4, 90, 70), (8, 150, 60))
    )
    many = (lookup_case("four of many", four, run), lookup_case("eight of many", eight, run))
    return [*kernel_lookups(run), *many]


INTERPRETED = (
    *kernel_pools(partial(triton_gpu.pool, interpret=True)),
    *lookups(partial(triton_gpu.lookup, interpret=True)),
)
ON_A_GPU = (
    *kernel_pools(partial(pool, implementation="triton")),
    *lookups(partial(lookup, implementation="triton")),
)


@pytest.mark.slow(days=28, group="interpreted patch_attention")
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted(case: OpCase) -> None:
    op_suite.check_reference(case)
    op_suite.check_poison(case)


@pytest.mark.slow(days=28, group="interpreted patch_attention")
@pytest.mark.parametrize("case", [INTERPRETED[0], INTERPRETED[3]], ids=str)
def test_interpreted_under_vmap(case: OpCase) -> None:
    op_suite.check_vmap(case)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def test_stands_back_where_jax_has_no_triton(monkeypatch: Any) -> None:
    monkeypatch.setattr(_hopper, "find_spec", lambda name: None)
    assert "this JAX has no Pallas backend for Triton" in (triton_why.why_not(HOPPER) or "it can run")


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
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "width": 64, "look_back": 8} | change
    q = jax.ShapeDtypeStruct((1, 2, 100, 4, call["width"]), call["dtype"])
    assert reason in (triton_why.why_not(call["device"], q, look_back=call["look_back"]) or "it can run")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: PatchShape) -> None:
    full = (shape.batch, shape.blocks, shape.block_size, shape.heads, shape.head_dim)
    assert (
        triton_why.why_not(HOPPER, jax.ShapeDtypeStruct(full, jnp.bfloat16), look_back=shape.look_back)
        is None
    )


def test_cannot_be_asked_for_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="this is cpu"):
        pool(**pool_arrays(), implementation="triton")
    assert triton_why.why_not(HOPPER) is None


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
@pytest.mark.parametrize("direction", ["pool", "lookup"])
def test_the_benchmark_passes_its_gate(direction: Any) -> None:
    shape = PatchShape("tiny", 1, 2, 96, 24, 2, 64, 3)
    ids = bench.patch_ids(shape)
    assert set(np.diff(ids, axis=-1).flat) == {0, 1}
    assert (ids[..., -1] < shape.capacity - 1).any()
    plan = bench.plan(bench.Direction("tiny", direction, shape), interpret=True)
    assert set(check(plan, jax.random.key(0))) == {"plain", "triton", "xla", "dense"}
