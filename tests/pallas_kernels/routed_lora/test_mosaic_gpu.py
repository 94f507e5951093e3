"""The Hopper kernel: simulated on the CPU with races watched, on a GPU what one device can run, and what it refuses.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


# Rows, columns and ranks that fill no tile; ranks of two sites on both sides of 64. Some are smaller than a tile, for
# speed: in simulation that works, `why_not` refuses it.
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
    Call(name="d256_static", batch=1, length=256, inputs=256, sites=((256, 4),), chunk=0),
)


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
        ({"inputs": 352}, "a width of 352 is no multiple"),
        ({"outputs": 328}, "a width of 328 is no multiple"),
        ({"inputs": 192}, "its tiles are 256 wide, and a width is 192"),
        ({"inputs": 64, "outputs": 64, "length": 3}, "and a width is 64"),
        ({"length": 127}, "its tiles have 256 tokens, x has 254"),
        ({"length": 0}, "x has 0"),
        ({"length": 1 << 23}, "it counts elements in 32 bits"),
        ({"inputs": 1 << 16, "outputs": 1 << 16}, "x is (2, 128, 65536) and the largest width 65536"),
        ({"weighed": False}, "without w there is nothing to add it to"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "length": 128, "inputs": 256, "outputs": 256}
    assert why_not(*_call(**call)) is None
    assert reason in (why_not(*_call(**call | change)) or "it can run")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"length": 8191}, "it has not been timed with fewer than 16384 tokens, x has 16382"),
        ({"inputs": 512}, "it has not been timed with widths below 1024, one is 512"),
        ({"outputs": 960}, "it has not been timed with widths below 1024, one is 960"),
    ],
)
def test_goes_first_where_it_was_timed(change: dict[str, Any], reason: str | None) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "length": 8192, "inputs": 1024, "outputs": 1024}
    device, *arrays = _call(**call | change)
    line = "mosaic_gpu on NVIDIA H200" if reason is None else f"xla on NVIDIA H200 (not mosaic_gpu: {reason})"
    assert explain(*arrays, device=device) == f"routed_lora: {line}"


def _call(device: Device, dtype: Any, length: int, inputs: int, outputs: int, weighed: bool = True) -> Any:
    sizes = (2, length, inputs), (inputs, outputs), (inputs, 4), (4, outputs)
    x, w, v, u = (jax.ShapeDtypeStruct(size, dtype) for size in sizes)
    return device, x, (w,) if weighed else None, (v,), (u,)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: RoutedLoraShape) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.inputs), jnp.bfloat16)
    sizes = (shape.inputs, shape.outputs), (shape.inputs, shape.rank), (shape.rank, shape.outputs)
    matrices = ((jax.ShapeDtypeStruct(size, jnp.bfloat16),) * shape.sites for size in sizes)
    assert why_not(HOPPER, x, *matrices) is None
