"""The Hopper kernel: simulated on the CPU with races watched, on a GPU what one device can run, and what it refuses.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device, compiling_for, reference_ops
from pallas_kernels.routed_lora import (
    active_blocks,
    can_skip,
    explain,
    mosaic_gpu_down,
    mosaic_gpu_product,
    routed_lora,
)
from pallas_kernels.routed_lora.grid import Grid, Term, place_of
from pallas_kernels.routed_lora.hopper import why_not
from pallas_kernels.routed_lora.mosaic_gpu import routed_lora_mosaic_gpu
from pallas_kernels.routed_lora.reference import routed_lora_reference
from pallas_kernels.routed_lora.shapes import SHAPES, RoutedLoraShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the op; `sites` are outputs and rank of each, `chunk` is 0 without a code.

    `active` numbers of a code are not 0, others than in the chunk and the row before; 0 for all, without `active`.
    """

    name: str
    batch: int = 2
    length: int = 75
    inputs: int = 192
    sites: tuple[tuple[int, int], ...] = ((192, 16),)
    chunk: int = 1
    blocks: int = 8
    active: int = 0
    channels_first: bool = False

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
            rows, columns, blocks = np.indices(found["code"].shape)
            if self.active:
                kept = (blocks - rows - columns) % self.blocks < self.active
                found["code"] = jnp.where(kept, found["code"], 0.0)
        for i, (outputs, rank) in enumerate(self.sites):
            found |= {f"w{i}": draw(self.inputs, outputs, size=self.inputs**-0.5)}
            found |= {f"v{i}": draw(self.inputs, rank, size=self.inputs**-0.5)}
            found |= {f"u{i}": draw(rank, outputs, size=rank**-0.5)}
        return found

    def case(self, op: Any) -> OpCase:
        def run(call: Any, x: Any) -> Any:
            w, v, u = (tuple(x[f"{name}{i}"] for i in range(len(self.sites))) for name in "wvu")
            options: dict[str, Any] = {"chunk": max(1, self.chunk), "scale": 0.5}
            options["channels_first"] = self.channels_first
            if self.active:
                options["active"] = active_blocks(x["code"], self.length, chunk=self.chunk)
            return call(x["x"], w, v, u, x.get("code"), **options)

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
    # Tiles of five steps of 64 ranks, of four and of three: one takes two groups of steps.
    Call(
        name="active",
        length=171,
        batch=3,
        inputs=128,
        chunk=57,
        sites=((192, 96), (64, 192)),
        blocks=6,
        active=2,
    ),
    # Two tiles of tokens a row, the second with a fourth of its tokens; columns that fill no tile.
    Call(name="channels_first", length=320, sites=((320, 40), (64, 8)), channels_first=True),
    Call(
        name="channels_first_active",
        length=256,
        inputs=64,
        chunk=64,
        sites=((64, 192),),
        blocks=6,
        active=2,
        channels_first=True,
    ),
)
LARGE = (
    Call(name="llama_7b_qkv", batch=2, length=2048, inputs=4096, sites=((4096, 16),) * 3, blocks=16),
    Call(name="llama_7b_out_r64", batch=1, length=4096, inputs=4096, sites=((4096, 64),), blocks=64),
    Call(name="d1024_groups", batch=3, length=1001, inputs=1024, sites=((1024, 64), (256, 8), (320, 40))),
    Call(name="d512_bank", batch=8, length=4096, inputs=512, sites=((512, 32),) * 3, chunk=64),
    Call(name="d512_rows", batch=64, length=300, inputs=512, sites=((2048, 16), (512, 8)), chunk=300),
    Call(name="d256_static", batch=1, length=256, inputs=256, sites=((256, 4),), chunk=0),
    Call(
        name="active_rows",
        batch=32,
        length=512,
        inputs=1024,
        sites=((1024, 512),) * 3,
        chunk=512,
        blocks=32,
        active=1,
    ),
    Call(
        name="channels_first",
        length=8192,
        inputs=1024,
        sites=((3072, 16),),
        blocks=16,
        channels_first=True,
    ),
    Call(
        name="channels_first_groups",
        batch=3,
        length=960,
        inputs=512,
        sites=((1024, 64), (256, 8), (320, 40)),
        channels_first=True,
    ),
    Call(
        name="channels_first_rows",
        batch=32,
        length=512,
        inputs=1024,
        sites=((1024, 512),) * 3,
        chunk=512,
        blocks=32,
        active=1,
        channels_first=True,
    ),
    Call(
        name="active_bank",
        batch=3,
        length=1001,
        inputs=512,
        sites=((1024, 640), (320, 160)),
        chunk=143,
        blocks=10,
        active=4,
    ),
)


@pytest.mark.slow(days=28, group="simulated kernels")
@pytest.mark.parametrize("call", SMALL, ids=str)
def test_simulated(call: Call, simulation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients; each of two clusters has several tiles."""
    monkeypatch.setattr(mosaic_gpu_product, "CLUSTERS", 2)
    monkeypatch.setattr(mosaic_gpu_down, "CLUSTERS", 2)
    op_suite.check_reference(call.case(partial(routed_lora_mosaic_gpu, interpret=simulation)))


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_with_a_cluster_a_tile(simulation: Any) -> None:
    op_suite.check_reference(THREE.case(partial(routed_lora_mosaic_gpu, interpret=simulation)))


@pytest.mark.slow(days=28, group="simulated kernels")
@pytest.mark.parametrize(
    "call", [call for call in SMALL if call.name in ("by_chunk", "channels_first")], ids=str
)
def test_simulated_under_vmap(call: Call, simulation: Any) -> None:
    op_suite.check_vmap(call.case(partial(routed_lora_mosaic_gpu, interpret=simulation)))


ROWS = Call(name="rows", length=260, inputs=64, sites=((64, 192),), chunk=260, blocks=3, active=1)
"""Tiles of either row, and one of both."""


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_under_vmap_with_blocks_that_are_not_active(simulation: Any) -> None:
    """Values alone, for speed."""
    x = ROWS.arrays()
    stacked = {name: jnp.stack([array, jnp.roll(array, 1, 0)]) for name, array in x.items()}
    found = jax.jit(jax.vmap(ROWS.case(partial(routed_lora_mosaic_gpu, interpret=simulation)).run))(stacked)
    expected = jax.vmap(ROWS.case(routed_lora_reference).run)(stacked)
    assert_close(found[0], expected[0], jnp.bfloat16, n=ROWS.inputs + 192)


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_skips(simulation: Any) -> None:
    _check_skips(ROWS, partial(routed_lora_mosaic_gpu, interpret=simulation))


@pytest.mark.gpu
def test_skips_on_a_gpu() -> None:
    _check_skips(
        replace(ROWS, length=512, chunk=512, inputs=256, sites=((256, 192),)),
        partial(routed_lora, implementation="mosaic_gpu"),
    )


def _check_skips(call: Call, op: Any) -> None:
    """Ranks of a block that no tile has are NaN, and nothing is read of them."""
    x = call.arrays()
    y = jax.jit(call.case(op).run)(
        x | {"v0": x["v0"].at[:, 128:].set(jnp.nan), "u0": x["u0"].at[128:].set(jnp.nan)}
    )
    zero = x | {"v0": x["v0"].at[:, 128:].set(0), "u0": x["u0"].at[128:].set(0)}
    assert_close(y[0], call.case(routed_lora_reference).run(zero)[0], jnp.bfloat16, n=call.inputs + 192)


def test_every_tile_has_its_place() -> None:
    """Each tile of each output once; those of a band follow each other downwards."""
    grid = Grid(((Term(0, 1, 0, 64),),) * 2, 37, (5, 2), False, 37, None)
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
        ({"rank": 24}, "it skips blocks of multiples of 16 ranks, and one has 12: leave active out"),
        ({"channels_first": True}, "its tiles have 256 tokens of one row, and a row has 128"),
        ({"channels_first": True, "length": 320}, "its lists of active blocks are of 256 tokens of one row"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "length": 128, "inputs": 256, "outputs": 256}
    active = jnp.ones((1, 2), bool)
    assert why_not(*_call(**call | {"rank": 32}), active=active) is None
    order = change.get("channels_first", False)
    given = _call(**call | {name: value for name, value in change.items() if name != "channels_first"})
    assert reason in (why_not(*given, active=active, channels_first=order) or "it can run")


@pytest.mark.parametrize(("length", "reason"), [(320, None), (328, "its stores are of 64 tokens of one row")])
def test_channels_first_takes_whole_stores(length: int, reason: str | None) -> None:
    call = _call(HOPPER, jnp.bfloat16, length, 256, 256)
    assert why_not(*call) is None
    found = why_not(*call, channels_first=True)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"length": 8191}, "it has not been timed with fewer than 16384 tokens, x has 16382"),
        ({"inputs": 512}, "it has not been timed with widths below 1024, one is 512"),
        ({"outputs": 960}, "it has not been timed with widths below 1024, one is 960"),
        ({"active": True}, None),
        ({"channels_first": True}, None),
    ],
)
def test_goes_first_where_it_was_timed(change: dict[str, Any], reason: str | None) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "length": 8192, "inputs": 1024, "outputs": 1024}
    active = jnp.ones((64, 2), bool) if change.get("active") else None
    order = change.get("channels_first", False)
    call |= {"rank": 32} | {name: n for name, n in change.items() if name not in ("active", "channels_first")}
    device, *arrays = _call(**call)
    line = "mosaic_gpu on NVIDIA H200" if reason is None else f"xla on NVIDIA H200 (not mosaic_gpu: {reason})"
    found = explain(*arrays, device=device, active=active, channels_first=order)
    assert found == f"routed_lora: {line}"


@pytest.mark.parametrize(
    ("change", "skips"),
    [
        ({}, True),
        ({"rank": 64}, False),  # a step has all blocks
        ({"rank": 136}, False),  # blocks of 68 ranks
        ({"length": 8191}, False),
        ({"outputs": 960}, False),
        ({"weighed": False}, False),
        ({"device": Device("gpu", (10, 0), "NVIDIA B200")}, False),
    ],
)
def test_says_where_it_skips(change: dict[str, Any], skips: bool) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "length": 8192, "inputs": 1024, "outputs": 1024}
    device, *arrays = _call(**call | {"rank": 128} | change)
    with compiling_for(as_jax(device)):
        assert can_skip(*arrays) is skips
        assert not can_skip(*arrays[:-1], None)
        assert can_skip(*arrays, channels_first=True) is skips
        with reference_ops():
            assert not can_skip(*arrays)
    assert not can_skip(*arrays)


def as_jax(device: Device) -> Any:
    """A device as JAX has it, for `compiling_for`."""
    capability = ".".join(map(str, device.capability or ()))
    return SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=device.kind)


def _call(
    device: Device, dtype: Any, length: int, inputs: int, outputs: int, weighed: bool = True, rank: int = 4
) -> Any:
    sizes = (2, length, inputs), (inputs, outputs), (inputs, rank), (rank, outputs)
    x, w, v, u = (jax.ShapeDtypeStruct(size, dtype) for size in sizes)
    code = jax.ShapeDtypeStruct((2, length, 2), jnp.float32)
    return device, x, (w,) if weighed else None, (v,), (u,), code


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: RoutedLoraShape) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.inputs), jnp.bfloat16)
    sizes = (shape.inputs, shape.outputs), (shape.inputs, shape.rank), (shape.rank, shape.outputs)
    matrices = ((jax.ShapeDtypeStruct(size, jnp.bfloat16),) * shape.sites for size in sizes)
    assert why_not(HOPPER, x, *matrices, channels_first=shape.channels_first) is None
