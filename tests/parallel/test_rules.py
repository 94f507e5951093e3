from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxblt.models import BLTConfig, ByteLMConfig
from jaxblt.parallel import (
    DEFAULT_RULES,
    batch_sharding,
    make_mesh,
    param_shardings,
    sharding_table,
    state_shardings,
)
from jaxblt.parallel.rules import bytes_per_device, place, placements
from jaxblt.patching import PatcherConfig
from tests.tolerances import assert_close

NAMES = {
    "table": ((64, 16), ("hash", "embed")),
    "up": ((16, 32), ("embed", "mlp")),
    "odd": ((15, 32), ("embed", "mlp")),
    "scale": ((16,), ("norm",)),
    "filter": ((16, 4), ("channels", "modes")),
}


class Toy(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name, (shape, axes) in NAMES.items():
            self.param(name, nn.with_logical_partitioning(nn.initializers.normal(), axes), shape)
        bare = self.param("bare", nn.initializers.zeros, (3,))
        return (
            nn.Dense(8, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed", "heads")))(x)
            + bare.sum()
        )


@pytest.fixture(scope="module")
def boxed() -> Any:
    return jax.eval_shape(Toy().init, jax.random.key(0), jnp.zeros((1, 16)))["params"]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(data=1, fsdp=4, tensor=2)


def test_specs_follow_the_rules(boxed: Any, mesh: Mesh) -> None:
    shardings = param_shardings(boxed, mesh)
    chex.assert_trees_all_equal_structs(shardings, nn.meta.unbox(boxed))
    specs = {name: tuple(shardings[name].spec) for name in NAMES}
    assert specs == {
        "table": ("fsdp", None),
        "up": ("fsdp", "tensor"),
        "odd": (None, "tensor"),
        "scale": (None,),
        "filter": (None, None),
    }
    assert tuple(shardings["bare"].spec) == (None,)
    assert tuple(shardings["Dense_0"]["kernel"].spec) == ("fsdp", "tensor")


def test_every_shard_is_what_the_table_says(boxed: Any, mesh: Mesh) -> None:
    shardings, found = param_shardings(boxed, mesh), placements(boxed, mesh)
    for name in NAMES:
        array = jax.device_put(np.zeros(found[name].shape, np.float32), shardings[name])
        assert {shard.data.nbytes for shard in array.addressable_shards} == {
            bytes_per_device(found[name], mesh)
        }


def test_the_table_shows_all_parameters_and_what_was_left_out(boxed: Any, mesh: Mesh) -> None:
    lines = sharding_table(boxed, mesh).splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert "embed: 15 not divisible by fsdp=4" in rows["odd"]
    assert "embed: fsdp in use" in rows["table"]
    assert "(fsdp, tensor)" in rows["up"]
    assert str(16 * 32 * 4 // 8) in rows["up"]
    total = sum(bytes_per_device(found, mesh) for found in placements(boxed, mesh).values())
    assert f"{total:,}" in rows["total"]
    assert len(lines) == len(jax.tree.leaves(nn.meta.unbox(boxed))) + 2


def test_one_device_splits_nothing_and_says_nothing(boxed: Any) -> None:
    alone = make_mesh(devices=jax.devices()[:1])
    for found in placements(boxed, alone).values():
        assert all(entry is None for entry in found.spec)
        assert found.notes == ()


def test_two_mesh_axes_on_one_array_axis(mesh: Mesh) -> None:
    rules = {**DEFAULT_RULES, "vocab": ("fsdp", "tensor")}
    assert place("w", (16, 5), ("vocab", None), mesh, rules) == (P(("fsdp", "tensor"), None), ())
    spec, notes = place("w", (12, 5), ("vocab", None), mesh, rules)
    assert spec == P("fsdp", None)
    assert notes == ("vocab: 12 not divisible by tensor=2",)


@pytest.mark.slow(days=28, group="costly")
def test_the_models_use_no_axis_without_a_rule(mesh: Mesh) -> None:
    ids = jnp.ones((1, 4096), jnp.int32)
    patcher = PatcherConfig(mode="static", patch_size=4)

    def init(key: jax.Array) -> Any:
        return BLTConfig().build(patcher=patcher).init(key, ids, segment_ids=ids)

    blt = placements(jax.eval_shape(init, jax.random.key(0))["params"], mesh)
    plain = placements(jax.eval_shape(ByteLMConfig().build().init, jax.random.key(0), ids)["params"], mesh)
    for found in (blt, plain):
        whole = sum(np.prod(p.shape) * p.dtype.itemsize for p in found.values())
        assert sum(bytes_per_device(p, mesh) for p in found.values()) < 0.3 * whole


@pytest.mark.parametrize(
    ("shape", "axes", "rules", "words"),
    [
        ((4, 4), ("embed", "colour"), DEFAULT_RULES, ["block/w", "'colour'", "known"]),
        ((4, 4), ("embed",), DEFAULT_RULES, ["block/w", "2 dimensions", "1 axis names"]),
        ((4,), ("embed",), {"embed": "rack"}, ["block/w", "'rack'", "the mesh has"]),
    ],
)
def test_bad_names_are_errors(mesh: Mesh, shape: Any, axes: Any, rules: Any, words: list[str]) -> None:
    box = nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names=axes)
    with pytest.raises(ValueError) as caught:
        param_shardings({"block": {"w": box}}, mesh, rules)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        ),
        optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2).gradient_transformation(),
        optax.adafactor(1e-3, min_dim_size_to_factor=8),
    ],
    ids=["adamw", "multisteps", "adafactor"],
)
def test_optimizer_state_lies_with_its_parameters(boxed: Any, mesh: Mesh, optimizer: Any) -> None:
    params, known = nn.meta.unbox(boxed), param_shardings(boxed, mesh)
    state = jax.eval_shape(optimizer.init, params)
    shardings = state_shardings(state, boxed, mesh)
    mirrored = optax.tree.map_params(
        optimizer,
        lambda leaf, param, sharding: sharding if leaf.shape == param.shape else None,
        state,
        params,
        known,
        transform_non_params=lambda leaf: None,
    )
    pairs = zip(
        jax.tree.leaves(mirrored, is_leaf=lambda x: x is None),
        jax.tree.leaves(shardings, is_leaf=lambda x: x is None),
        strict=True,
    )
    expected = [NamedSharding(mesh, P()) if want is None else want for want, _ in pairs]
    assert jax.tree.leaves(shardings) == expected
    assert any(len(sharding.spec) for sharding in expected)


@pytest.mark.slow(days=28, group="costly")
def test_a_sharded_step_equals_the_single_device_step(mesh: Mesh) -> None:
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(Toy().apply({"params": params}, x)) ** 2)

    def start(key: jax.Array) -> Any:
        return nn.meta.unbox(Toy().init(key, jnp.zeros((1, 16))))["params"]

    boxed = jax.eval_shape(Toy().init, jax.random.key(0), jnp.zeros((1, 16)))["params"]
    params = jax.jit(start, out_shardings=param_shardings(boxed, mesh))(jax.random.key(0))
    value, grads = jax.jit(jax.value_and_grad(loss))(params, jax.device_put(x, batch_sharding(mesh)))
    want, want_grads = jax.jit(jax.value_and_grad(loss))(start(jax.random.key(0)), x)
    assert_close(value, want, n=8 * 16)
    jax.tree.map(lambda a, b: assert_close(a, b, n=8 * 16), grads, want_grads)
    assert not grads["Dense_0"]["kernel"].sharding.is_fully_replicated
