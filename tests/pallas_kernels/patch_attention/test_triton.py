"""The Triton kernels: interpreted on the CPU, on a GPU what of the suite one device can run, and what they refuse."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.patch_attention import hopper, lookup, pool, triton_gpu
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.patch_attention.cases import (
    kernel_lookups,
    kernel_pools,
    lookup_arrays,
    lookup_case,
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


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted(case: OpCase) -> None:
    op_suite.check_reference(case)
    op_suite.check_poison(case)


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
    monkeypatch.setattr(hopper, "find_spec", lambda name: None)
    assert "this JAX has no Pallas backend for Triton" in (hopper.why_not_triton(HOPPER) or "it can run")
