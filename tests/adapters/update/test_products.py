"""Products that read one x: one call of the op where they are adapted, and what calls site by site give."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, Governor
from jaxblt.adapters.update import products
from jaxblt.adapters.update.site import adapted
from jaxblt.layers import Linear, linears
from jaxblt.mixers import (
    AttentionConfig,
    DualDecayConfig,
    GatedDeltaNetConfig,
    GatedRecurrenceConfig,
    HyenaConfig,
)
from jaxblt.models.stack import Block, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.precision.weights import quantize_kernel
from pallas_kernels._dispatch import compiling_for, record_choices
from tests.adapters.update.test_site import H200, kernels
from tests.parameters import drawn
from tests.tolerances import assert_close

ADAPTER = AdapterConfig(sites=("[qkv]",), rank=4, alpha=8.0)
NAMES = ("embed", "heads", "head_dim")
ROWS, LENGTH, DIM = 8, 3, 6


class Heads(nn.Module):
    """q, k and v, together or one by one; k has a bias, if channels come last."""

    adapter: AdapterConfig
    together: bool = True
    equations: tuple[str, ...] = ("btd,dhk->bthk",) * 3
    width: int = 5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any, code: Any = None) -> Any:
        ones = nn.initializers.ones if self.equations[1].endswith("k") else None
        biases = None, ones, None
        layers = [
            Linear(equation, {"h": heads, "k": self.width}, NAMES, self.dtype, bias=bias, name=name)
            for name, heads, equation, bias in zip("qkv", (4, 2, 2), self.equations, biases, strict=True)
        ]
        with adapted(self.adapter, self.path, 0, code):
            return linears(x, layers) if self.together else [layer(x) for layer in layers]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sites of each call of the op."""
    found: list[int] = []
    op = products.routed_lora

    def counted(x: Any, w: Any, v: Any, *rest: Any, **options: Any) -> Any:
        found.append(len(v))
        return op(x, w, v, *rest, **options)

    monkeypatch.setattr(products, "routed_lora", counted)
    return found


def numbers(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


CASES = {
    "a code": (Heads(ADAPTER), 4, [3]),
    "no code": (Heads(ADAPTER), 0, [3]),
    "k is not adapted": (Heads(dataclasses.replace(ADAPTER, sites=("[qv]",))), 4, [2]),
    "two ranks": (Heads(dataclasses.replace(ADAPTER, sites=(("[qv]", 4), ("k", 2)), blocks=None)), 0, [2, 1]),
    "codes of their own": (Heads(dataclasses.replace(ADAPTER, governor=Governor(start=0.5))), 4, [1, 1, 1]),
    "channels first in v": (
        Heads(ADAPTER, equations=("btd,dhk->bthk", "btd,dhk->bthk", "btd,dhk->bhkt")),
        4,
        [2, 1],
    ),
    "channels first": (Heads(ADAPTER, equations=("btd,dhk->bhkt",) * 3), 4, [3]),
}


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_products")
@pytest.mark.parametrize("case", CASES)
def test_a_group_is_what_its_sites_are_one_by_one(case: str, calls: list[int]) -> None:
    module, count, groups = CASES[case]
    apart = module.clone(together=False)
    x, code = numbers(ROWS, LENGTH, DIM), numbers(ROWS, LENGTH, count) if count else None
    params = drawn(module, x, code)
    assert jax.tree.map(jnp.shape, drawn(apart, x, code)) == jax.tree.map(jnp.shape, params)
    calls.clear()

    def loss(given: Any, heads: Any) -> Any:
        ys = heads.apply(*given)
        return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

    @jax.jit
    def both(given: Any) -> Any:
        step = jax.value_and_grad(loss, has_aux=True)
        return step(given, module), step(given, apart)

    found, expected = both((params, x, code))
    assert calls == groups + [1] * sum(groups)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, one), group in zip(leaves, jax.tree.leaves(found), strict=True):
        assert_close(group, one, n=200, what=jax.tree_util.keystr(path))


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_products")
def test_a_group_over_rows_of_several_devices_is_that_of_one() -> None:
    module, x, code = Heads(ADAPTER), numbers(ROWS, LENGTH, DIM), numbers(ROWS, LENGTH, 4)
    given, found = (drawn(module, x, code), x, code), []
    for mesh in ({"devices": jax.devices()[:1]}, {"data": 2, "fsdp": 4}):
        with jax.set_mesh(make_mesh(**mesh)):
            step = jax.jit(jax.value_and_grad(lambda g: sum(jnp.sum(jnp.sin(y)) for y in module.apply(*g))))
            found.append(jax.tree.leaves(jax.device_get(step(given))))
    for one, several in zip(*found, strict=True):
        assert_close(several, one, n=200)


BLOCKS = {
    "attention": (
        AttentionConfig(dim=8, num_heads=2, num_kv_heads=1),
        ("q", "k", "v", "out"),
        [3, 1, 2, 1],
    ),
    "linear attention": (DualDecayConfig(dim=8, num_heads=2), ("q", "k", "v", "out"), [3, 1, 2, 1]),
    "gated recurrence": (
        GatedRecurrenceConfig(dim=8, cell="minlstm"),
        ("in", "gate", "write", "out"),
        [3, 1, 2, 1],
    ),
    "matrix state": (
        GatedDeltaNetConfig(dim=8, num_heads=2),
        (*(f"streams/{name}" for name in "qkv"), "beta", "decay/step", "readout/gate", "readout/out"),
        [3, 1, 1, 1, 1, 2, 1],
    ),
    "hyena": (HyenaConfig(dim=8), ("in", "out"), [1, 2, 1]),  # "out" reads channels first
}


@pytest.mark.parametrize("mixer", BLOCKS)
def test_a_block_calls_the_op_once_for_each_x(mixer: str, calls: list[int]) -> None:
    config, names, groups = BLOCKS[mixer]
    adapter = AdapterConfig(sites=("mixer/*", "mlp/*"), rank=2)
    stack = StackConfig(dim=8, num_layers=1, pattern="X", mixers={"X": config}, mlp_dim=16, adapter=adapter)
    block, x = Block(stack, "X", jnp.float32), jax.ShapeDtypeStruct((1, 4, 8), jnp.float32)
    params = jax.eval_shape(block.init, jax.random.key(0), x, None, None, None)["params"]
    assert calls == groups
    bare = Block(dataclasses.replace(stack, adapter=None), "X", jnp.float32)
    base = jax.eval_shape(bare.init, jax.random.key(0), x, None, None, None)["params"]
    below = {f"mixer/{name}" for name in names} | {f"mlp/{n}" for n in ("gate", "up", "down")}
    added = {f"{name}/adapter/{matrix}" for name in below for matrix in "vu"}
    assert paths(params) == paths(base) | added


def paths(tree: Any) -> set[str]:
    """Of the parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(nn.meta.unbox(tree))
    return {"/".join(str(key.key) for key in path) for path, _ in leaves}


def test_a_group_is_one_kernel_forward_and_one_back() -> None:
    module = Heads(ADAPTER, width=512, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1, 16_384, 1024), jnp.bfloat16)
    params = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))

    def loss(params: Any, x: Any) -> Any:
        return sum(jnp.sum(y.astype(jnp.float32)) for y in module.apply(params, x))

    with compiling_for(H200), record_choices() as lines:
        program = jax.make_jaxpr(jax.grad(loss))(params, x)
    assert lines == ["routed_lora: mosaic_gpu on NVIDIA H200"]
    assert kernels(program.jaxpr) == ["routed_lora", "routed_lora_dx"]


def test_updates_are_added_to_quantised_kernels(calls: list[int]) -> None:
    """The op multiplies arrays only: it makes the updates alone, and the kernel its own product."""
    module, x = Heads(ADAPTER), numbers(ROWS, LENGTH, DIM)
    code = numbers(ROWS, LENGTH, 4)
    params = drawn(module, x, code)["params"]
    stored, dense = ({**params}, {**params})
    for name in "qkv":
        kernel = quantize_kernel(params[name]["kernel"], "int8", summed=1)
        stored[name] = {**params[name], "kernel": kernel}
        dense[name] = {**params[name], "kernel": kernel.dense()}
    calls.clear()
    run = jax.jit(lambda given: module.apply({"params": given}, x, code))
    found, expected = run(stored), run(dense)
    assert calls == [1, 1, 1, 3]
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, n=DIM)
