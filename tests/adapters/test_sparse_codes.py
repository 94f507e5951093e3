"""Codes with zeros: the op is told which blocks are 0 where its kernel skips them, and nothing else changes."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Clamp,
    Confidence,
    Draw,
    Ema,
    Governor,
    RouterConfig,
    Sparse,
    Sticky,
    TopK,
    attach,
)
from jaxblt.adapters.update import products
from jaxblt.adapters.update.row_adapters import choose_adapters
from jaxblt.layers import Linear, linears
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh
from pallas_kernels._dispatch import compiling_for, reference_ops
from tests.adapters.update.test_site import H200, kernels
from tests.parameters import drawn
from tests.tolerances import assert_close

BANK = AdapterConfig(sites=("[qkv]",), rank=8, blocks=4, router=RouterConfig())
ROWS, LENGTH, DIM = 8, 40, 6
"""320 tokens, which are two tiles, and one tile of each of 8 devices."""


class Sites(nn.Module):
    """q, k and v of one x."""

    adapter: AdapterConfig
    chosen: bool = False
    width: int = 5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any, code: Any) -> Any:
        names = ("embed", "features")
        layers = [Linear("btd,de->bte", {"e": self.width}, names, self.dtype, name=name) for name in "qkv"]
        with self.adapter.inside(self.path, 0, code, chosen=self.chosen):
            return linears(x, layers)


def with_code(*code: Any, **changes: Any) -> AdapterConfig:
    return dataclasses.replace(BANK, code=code, **changes)


@pytest.mark.parametrize(
    ("adapter", "sparse"),
    [
        (AdapterConfig(), False),
        (BANK, False),
        (with_code(blocks=None), False),
        (with_code(Ema(), Clamp()), False),
        (with_code(TopK(3)), True),
        (with_code(TopK(4)), False),
        (with_code(Sparse(), Clamp()), True),
        (with_code(Ema(), Sticky()), True),
        (with_code(Draw()), True),
        (with_code(TopK(1), Ema()), False),
        (with_code(Sticky(), Confidence()), False),
    ],
)
def test_which_codes_have_zeros(adapter: AdapterConfig, sparse: bool) -> None:
    assert adapter.is_sparse is sparse


WIDE = {"rank": 128, "blocks": 8}
SKIPPING = ["routed_lora_down", "routed_lora", "routed_lora_dx"]
PROGRAMS = {
    "the largest": (with_code(TopK(1), **WIDE), {}, SKIPPING),
    "thresholds": (with_code(Sparse(), **WIDE), {}, SKIPPING),
    "straight through": (with_code(Sticky(), **WIDE), {}, SKIPPING),
    "one site": (with_code(TopK(1), **WIDE, sites=("q",)), {}, SKIPPING),
    "codes of their own": (with_code(TopK(1), **WIDE, governor=Governor()), {}, SKIPPING * 3),
    "chosen for rows": (with_code(**WIDE), {"chosen": True}, SKIPPING),
    "a softmax": (with_code(**WIDE), {}, SKIPPING[1:]),
    "blocks of 8 ranks": (with_code(TopK(1), rank=128, blocks=16), {}, SKIPPING[1:]),
    "one step": (with_code(TopK(1), rank=64, blocks=4), {}, SKIPPING[1:]),
    "no kernel": (with_code(TopK(1), **WIDE), {"width": 512}, []),
}


MESH = {"data": 2, "fsdp": 4}


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_sparse_codes")
@pytest.mark.parametrize(
    ("case", "mesh"), [*((case, None) for case in PROGRAMS), ("the largest", MESH)], ids=str
)
def test_the_kernel_skips_blocks_of_such_codes(case: str, mesh: Any) -> None:
    adapter, options, expected = PROGRAMS[case]
    module = Sites(adapter, **{"width": 1024, "dtype": jnp.bfloat16} | options)
    x = jax.ShapeDtypeStruct((8, 16_384, 1024), jnp.bfloat16)
    code = jax.ShapeDtypeStruct((*x.shape[:2], adapter.numbers), jnp.float32)

    def loss(params: Any, x: Any, code: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in module.apply(params, x, code))

    with compiling_for(H200), nullcontext() if mesh is None else jax.set_mesh(make_mesh(**mesh)):
        params = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x, code))
        found = kernels(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(params, x, code).jaxpr)
    assert sorted(found) == sorted(expected)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the op is told of each call's blocks, as if every implementation skipped them."""
    found: list[Any] = []
    op = products.routed_lora

    def recorded(*arrays: Any, active: Any, **options: Any) -> Any:
        found.append(None if active is None else active.shape)
        return op(*arrays, active=active, **options)

    monkeypatch.setattr(products, "routed_lora", recorded)
    monkeypatch.setattr(products, "can_skip", lambda *arrays, **options: arrays[-1] is not None)
    return found


def numbers(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def row_codes() -> Any:
    """A block for each row: the first tile has all four, the second two of them."""
    return jnp.asarray(np.eye(4)[np.arange(ROWS) % 4][:, None] * np.ones((1, LENGTH, 1)), jnp.float32)


def step(module: Any, given: Any) -> Any:
    """Values, and gradients of everything: of the code at its zeros too."""

    def loss(given: Any) -> Any:
        ys = module.apply(*given)
        return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(given)


def assert_same(found: Any, expected: Any) -> None:
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        assert_close(other, one, n=ROWS * LENGTH, what=jax.tree_util.keystr(path))


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_sparse_codes")
@pytest.mark.parametrize("ops", [nullcontext, reference_ops], ids=["xla", "reference"])
@pytest.mark.parametrize(
    ("changes", "calls"),
    [({}, 1), ({"sites": ("q",)}, 1), ({"governor": Governor(start=0.5)}, 3)],
    ids=["a group", "one site", "codes of their own"],
)
def test_values_and_gradients_are_those_of_all_blocks(changes: Any, calls: int, ops: Any, told: Any) -> None:
    """The gradient of a straight-through code at its zeros is what a router learns from."""
    sparse, dense = (Sites(with_code(*code, **changes)) for code in ((Sticky(),), ()))
    x, code = numbers(ROWS, LENGTH, DIM), row_codes()
    given = drawn(sparse, x, code), x, code
    told.clear()
    with ops():
        found, expected = step(sparse, given), step(dense, given)
    assert told == [(2, 4)] * calls + [None] * calls
    assert np.all(np.asarray(expected[1][2])[np.asarray(code) == 0])
    assert_same(found, expected)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_sparse_codes")
@pytest.mark.parametrize("theta", [0.1, 0.5])
def test_what_sparse_leaves_out_is_bounded_by_its_threshold(theta: float) -> None:
    """Each number that is cut was below theta: |y - y_sparse| <= theta (alpha/r) |x V| |U|, and 0 where none is cut."""
    adapter = with_code(blocks=None)
    module, x = Sites(adapter), numbers(ROWS, LENGTH, DIM)
    code = numbers(ROWS, LENGTH, adapter.numbers)
    code = code.at[0].set(jnp.where(jnp.abs(code[0]) < theta, 1.0, code[0]))
    cut = Sparse(theta).apply(module, "", code, None, None, None)[0]
    params = drawn(module, x, code)
    whole, sparse = (module.apply(params, x, given) for given in (code, cut))
    for name, y, near in zip("qkv", whole, sparse, strict=True):
        v, u = (params["params"][name]["adapter"][key] for key in "vu")
        most = theta * adapter.alpha / adapter.rank * jnp.abs(x @ v) @ jnp.abs(u)
        error = np.abs(y - near)
        assert (error <= most + 1e-5).all()
        np.testing.assert_array_equal(error[0], 0)
        assert error[1:].max() > 0.01


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_sparse_codes")
def test_devices_count_tiles_from_their_own_rows(told: Any) -> None:
    module, x, code = Sites(with_code(TopK(1))), numbers(ROWS, LENGTH, DIM), row_codes()
    given, found = (drawn(module, x, code), x, code), []
    told.clear()
    for mesh in ({"devices": jax.devices()[:1]}, MESH):
        with jax.set_mesh(make_mesh(**mesh)):
            found.append(jax.device_get(step(module, given)))
    assert told == [(2, 4), (1, 4)]
    assert_same(*found)


STACK = StackConfig(
    dim=8, num_layers=3, pattern="AA", mixers={"A": AttentionConfig(dim=8, num_heads=2)}, mlp_dim=12
)
SERVED = AdapterConfig(
    sites=("mlp/down", "mixer/out"), rank=4, blocks=2, router=RouterConfig(reads=(ChunkMean(),), chunk=4)
)


LEVELS = (("mlp/*", "token"),)


@pytest.mark.slow(days=28, group="codes and sites of adapters")
@pytest.mark.parametrize(
    ("scan", "per", "levels"),
    [(True, "stack", ()), (False, "stack", LEVELS), (True, "block", LEVELS), (False, "block", ())],
    ids=["scanned", "unrolled", "scanned, a router a block", "unrolled, a router a block"],
)
def test_adapters_of_rows_are_told_where_they_were_chosen(
    scan: bool, per: Any, levels: Any, told: Any
) -> None:
    router = dataclasses.replace(SERVED.router, per=per)
    stack = dataclasses.replace(STACK, scan=scan, remat="full")
    config = attach(ByteLMConfig(stack=stack), dataclasses.replace(SERVED, router=router, levels=levels))
    ids = jnp.zeros((3, 100), jnp.int32)
    model = config.build()
    variables = {"params": jax.eval_shape(model.init, jax.random.key(0), ids)["params"]}
    for chosen, expected in (({}, None), ({"chosen": choose_adapters(config, [0, 1, None])}, (2, 2))):
        told.clear()
        jax.eval_shape(model.apply, variables | chosen, ids)
        assert set(told) == {expected}


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_sparse_codes")
def test_rows_with_adapters_of_their_own_have_the_logits_of_all_blocks(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three tiles the first has one expert, and the second the base and the other one."""
    config = attach(ByteLMConfig(stack=STACK), SERVED)
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (5, 128)), jnp.int32)
    variables = {
        "params": drawn(config.build(), ids)["params"],
        "chosen": choose_adapters(config, [0, 0, "base", 1, None]),
    }
    found = []
    for skips in (True, False):
        monkeypatch.setattr(products, "can_skip", lambda *arrays, skips=skips, **options: skips)
        run = jax.jit(lambda v: config.build().apply(v, ids)[0])
        found.append(run(variables))
    assert {(3, 2), None} <= set(told)
    assert_close(found[0], found[1], n=128 * 8)
