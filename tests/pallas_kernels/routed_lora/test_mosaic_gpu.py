"""The Hopper kernel: simulated on the CPU with races watched, on a GPU what one device can run, and what it refuses.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._dispatch import Device
from pallas_kernels.routed_lora import explain, mosaic_gpu_product, routed_lora
from pallas_kernels.routed_lora.grid import Grid, Term, place_of
from pallas_kernels.routed_lora.hopper import why_not
from pallas_kernels.routed_lora.mosaic_gpu import routed_lora_mosaic_gpu
from pallas_kernels.routed_lora.reference import routed_lora_reference
from pallas_kernels.routed_lora.shapes import SHAPES, RoutedLoraShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the op; `sites` are outputs and rank of each, `chunk` is 0 without a code."""

    name: str
    batch: int = 2
    length: int = 75
    inputs: int = 192
    sites: tuple[tuple[int, int], ...] = ((192, 16),)
    chunk: int = 1
    blocks: int = 8

    def __str__(self) -> str:
        return self.name

    def arrays(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)

        def draw(*shape: int, size: float = 1.0) -> Any:
            return jnp.asarray(size * rng.standard_normal(shape, np.float32), jnp.bfloat16)

        found = {"x": draw(self.batch, self.length, self.inputs)}
        if self.chunk:
            chunks = -(-self.length // self.chunk)
            found["code"] = draw(self.batch, chunks, self.blocks).astype(jnp.float32)
        for i, (outputs, rank) in enumerate(self.sites):
            found |= {f"w{i}": draw(self.inputs, outputs, size=self.inputs**-0.5)}
            found |= {f"v{i}": draw(self.inputs, rank, size=self.inputs**-0.5)}
            found |= {f"u{i}": draw(rank, outputs, size=rank**-0.5)}
        return found

    def case(self, op: Any) -> OpCase:
        def run(call: Any, x: Any) -> Any:
            w, v, u = (tuple(x[f"{name}{i}"] for i in range(len(self.sites))) for name in "wvu")
            return call(x["x"], w, v, u, x.get("code"), chunk=max(1, self.chunk), scale=0.5)

        arrays = self.arrays()
        return OpCase(
            name=self.name,
            run=partial(run, op),
            reference=partial(run, routed_lora_reference),
            arrays=arrays,
            shared=frozenset(arrays) - {"x", "code"},
            terms=self.inputs + sum(rank for _, rank in self.sites),
            grad_terms=self.batch * self.length + sum(outputs for outputs, _ in self.sites),
        )


# Rows, columns and ranks that fill no tile; ranks of two sites on both sides of 64.
THREE = Call(name="three_sites", sites=((320, 40), (64, 8), (128, 24)))
SMALL = (
    THREE,
    Call(name="by_chunk", chunk=16),
    Call(name="by_row", chunk=75, batch=3),
    Call(name="without_a_code", length=150, chunk=0, sites=((64, 6), (64, 3))),
)
LARGE = (
    Call(name="llama_7b_qkv", batch=2, length=2048, inputs=4096, sites=((4096, 16),) * 3, blocks=16),
    Call(name="llama_7b_out_r64", batch=1, length=4096, inputs=4096, sites=((4096, 64),), blocks=64),
    Call(name="d1024_groups", batch=3, length=1001, inputs=1024, sites=((1024, 64), (256, 8), (320, 40))),
    Call(name="d512_bank", batch=8, length=4096, inputs=512, sites=((512, 32),) * 3, chunk=64),
    Call(name="d512_rows", batch=64, length=300, inputs=512, sites=((2048, 16), (512, 8)), chunk=300),
    Call(name="d64_static", batch=1, length=3, inputs=64, sites=((64, 4),), chunk=0),
)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[plgpu.InterpretGPUParams]:
    """How to simulate kernels: each is watched for races (`get_races` knows of the last one alone)."""
    watched, watch = [], gpu_callbacks.GPURaceDetectionState

    def recorded(**options: Any) -> Any:
        watched.append(watch(**options))
        return watched[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", recorded)
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert watched, "nothing was simulated"
    assert not any(kernel.races_found for kernel in watched)


@pytest.mark.slow(weeks=6, group="simulated routed_lora", every="three_sites")
@pytest.mark.parametrize("call", SMALL, ids=str)
def test_simulated(call: Call, simulation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients; each of two clusters has several tiles."""
    monkeypatch.setattr(mosaic_gpu_product, "CLUSTERS", 2)
    op_suite.check_reference(call.case(partial(routed_lora_mosaic_gpu, interpret=simulation)))


@pytest.mark.slow(weeks=6, group="simulated routed_lora")
def test_simulated_with_a_cluster_a_tile(simulation: Any) -> None:
    op_suite.check_reference(THREE.case(partial(routed_lora_mosaic_gpu, interpret=simulation)))


@pytest.mark.slow(weeks=6, group="simulated routed_lora")
def test_simulated_under_vmap(simulation: Any) -> None:
    op_suite.check_vmap(SMALL[1].case(partial(routed_lora_mosaic_gpu, interpret=simulation)))


def test_every_tile_has_its_place() -> None:
    """Each tile of each output once; those of a band follow each other downwards."""
    grid = Grid(((Term(0, 1, 0, 64),),) * 2, 37, (5, 2), False)
    count = 37 * (5 + 2)
    place = jax.vmap(partial(place_of, grid))(jnp.arange(count, dtype=jnp.int32))
    found = np.stack([*place], 1).tolist()
    assert sorted(found) == [[i, row, n] for i in (0, 1) for row in range(37) for n in range((5, 2)[i])]
    assert found[:9] == [[0, row, 0] for row in range(8)] + [[0, 0, 1]]
    assert found[5 * 32 : 5 * 32 + 6] == [[0, row, 0] for row in range(32, 37)] + [[0, 32, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map", "poison"}))
@pytest.mark.parametrize("call", LARGE, ids=str)
def test_on_a_gpu(call: Call, check: str) -> None:
    op_suite.CHECKS[check](call.case(partial(routed_lora, implementation="mosaic_gpu")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"device": Device("gpu", (10, 0), "NVIDIA B200")},
            "capability 9.0 exactly (H100, H200), this is NVIDIA B200",
        ),
        ({"dtype": jnp.float32}, "it takes bf16 tokens, x is float32"),
        ({"inputs": 96}, "a width of 96 is no multiple"),
        ({"outputs": 72}, "a width of 72 is no multiple"),
        ({"length": 0}, "one token at least, x is (2, 0, 64)"),
        ({"length": 1 << 24}, "it counts elements in 32 bits"),
        ({"weighed": False}, "without w there is nothing to add it to"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "length": 75, "inputs": 64, "outputs": 64}
    device, dtype, length, inputs, outputs, weighed = (call | {"weighed": True} | change).values()
    x, w, v, u = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((2, length, inputs), (inputs, outputs), (inputs, 4), (4, outputs))
    )
    assert reason in (why_not(device, x, (w,) if weighed else None, (v,), (u,)) or "it can run")


def _shapes(shape: RoutedLoraShape) -> tuple[Any, ...]:
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.inputs), jnp.bfloat16)
    sizes = (shape.inputs, shape.outputs), (shape.inputs, shape.rank), (shape.rank, shape.outputs)
    return x, *((jax.ShapeDtypeStruct(size, jnp.bfloat16),) * shape.sites for size in sizes)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models_if_it_is_named(shape: RoutedLoraShape) -> None:
    assert why_not(HOPPER, *_shapes(shape)) is None
    line = explain(*_shapes(shape), device=HOPPER)
    assert line == "routed_lora: xla on NVIDIA H200 (not mosaic_gpu: it has not been timed on an H200)"
