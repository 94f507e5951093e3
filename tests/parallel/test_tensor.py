"""Tensor parallelism: heads and feed-forward columns over `tensor`, beside data, fsdp and seq."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jaxblt.data.batch import Batch
from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.parallel import MeshConfig, batch_sharding, sharding_table, state_shardings
from jaxblt.parallel.rules import bytes_per_device, placements
from jaxblt.patching import PatcherConfig
from jaxblt.testing.collectives import collectives
from jaxblt.training.state import start
from jaxblt.training.step import Task, make_train_step
from tests.mixer_table import table
from tests.parameters import drawn
from tests.tolerances import relative_error

ROWS, LENGTH = 8, 48
PATCHER = PatcherConfig(mode="static", block_size=24, patch_size=3)
KEEP = optax.trace(decay=0.0)
"""Its state after a step is the step's gradient."""
MESHES = {
    "data": MeshConfig(data=4, tensor=2),
    "fsdp": MeshConfig(data=2, fsdp=2, tensor=2),
    "seq": MeshConfig(data=2, seq=2, tensor=2),
    "four": MeshConfig(data=2, tensor=4),
    "eight": MeshConfig(data=1, tensor=8),
}


def stack(dim: int, pattern: str, hidden: int) -> StackConfig:
    attention = AttentionConfig(dim=dim, num_heads=4)
    return StackConfig(
        dim=dim,
        num_layers=len(pattern),
        pattern=pattern,
        mlp_dim=hidden,
        mixers=table(attention=attention, window=8),
    )


def grouped(heads: int, groups: int) -> ByteLMConfig:
    attention = AttentionConfig(dim=32, num_heads=heads, num_kv_heads=groups, position="alibi")
    return ByteLMConfig(
        stack=StackConfig(dim=32, num_layers=1, pattern="A", mlp_dim=32, mixers={"A": attention})
    )


MODELS = {
    "byte_lm": ByteLMConfig(stack=stack(32, "WA", 88)),
    "grouped": grouped(8, 4),
    "few": grouped(4, 2),
    "blt": BLTConfig(
        encoder=stack(32, "W", 88),
        latent=stack(64, "A", 152),
        decoder=stack(32, "W", 88),
        hash=None,
        bridge_heads=4,
    ),
}


@functools.cache
def job(name: str) -> tuple[Task, Any, Batch]:
    """The task, its boxed parameters and a batch."""
    text = np.random.default_rng(0).integers(4, 20, (2, ROWS, LENGTH)).astype(np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    ids = jnp.asarray(text[0])
    model = MODELS[name].build(patcher=PATCHER if name == "blt" else None)
    boxed = drawn(model, ids, boxed=True)["params"]
    places = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ones.shape)
    batch = Batch(*map(jnp.asarray, (*text, ones, places, ones)))
    return Task(model, packed=False), boxed, jax.device_get(batch)


@functools.cache
def one_device(name: str) -> tuple[Any, Any]:
    task, boxed, batch = job(name)
    params = jax.tree.map(jnp.copy, nn.meta.unbox(boxed))
    after: Any
    after, metrics = make_train_step(task, KEEP)(start(params, KEEP), batch)
    return jax.device_get(after.opt_state.trace), float(metrics["loss"])


@functools.cache
def on_mesh(name: str, layout: str) -> tuple[Any, float, Any, Mesh]:
    """Gradients, loss and the compiled step."""
    task, boxed, batch = job(name)
    mesh = MESHES[layout].build()
    state = start(jax.device_get(nn.meta.unbox(boxed)), KEEP)
    shardings = state_shardings(state, boxed, mesh)
    with jax.set_mesh(mesh):
        state, rows = jax.device_put(state, shardings), jax.device_put(batch, batch_sharding(mesh))
        step: Any = make_train_step(task, KEEP, shardings=shardings)
        compiled = step.lower(state, rows).compile()
        after, metrics = compiled(state, rows)
    return after.opt_state.trace, float(metrics["loss"]), compiled, mesh


TURNS = pytest.mark.slow(days=28, group="models over a split axis")
CASES = pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("grouped", "seq"),
        *(
            pytest.param(name, layout, marks=TURNS)
            for name, layout in (
                ("byte_lm", "four"),
                ("blt", "fsdp"),
                ("grouped", "data"),
                ("grouped", "four"),
                ("byte_lm", "fsdp"),
                ("blt", "four"),
                ("blt", "data"),
                ("byte_lm", "data"),
                ("blt", "seq"),
            )
        ),
    ],
)


@CASES
def test_a_split_step(name: str, layout: str) -> None:
    """One case for what its compiled step shows, so that all of it falls into one week."""
    expect_loss_and_gradients_of_one_device(name, layout)
    expect_no_weight_gathered_that_tensor_splits(name, layout)
    expect_the_table_to_say_what_a_device_holds(name, layout)


def expect_loss_and_gradients_of_one_device(name: str, layout: str) -> None:
    expected, loss = one_device(name)
    found, same, _, _ = on_mesh(name, layout)
    assert same == pytest.approx(loss, rel=1e-5)
    errors = jax.tree.map(relative_error, jax.device_get(found), expected)
    assert max(jax.tree.leaves(errors)) < 1e-5, errors


def sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape however its axes are turned; a loop over layers sees one of them."""
    return tuple(sorted(d for d in shape if d > 1))


@TURNS
@pytest.mark.parametrize(("name", "layout"), [("byte_lm", "eight"), ("blt", "eight"), ("few", "seq")])
def test_too_few_heads_stay_whole_over_tensor(name: str, layout: str) -> None:
    """Four of them over eight devices; two groups over two that exchange heads along the sequence besides."""
    expect_loss_and_gradients_of_one_device(name, layout)


def expect_no_weight_gathered_that_tensor_splits(name: str, layout: str) -> None:
    _, _, compiled, mesh = on_mesh(name, layout)
    found = placements(job(name)[1], mesh)
    split = {where: sizes(place.shape) for where, place in found.items() if "tensor" in place.spec}
    # one that is whole over `tensor` may be gathered over fsdp, and may look like another that is not
    others = {sizes(place.shape) for where, place in found.items() if where not in split}
    split = {where: shape for where, shape in split.items() if shape not in others}
    for layer in ("mixer/q", "mixer/k", "mixer/v", "mixer/out", "mlp/gate", "mlp/up", "mlp/down"):
        assert any(layer in where for where in split), (layer, sorted(split))
    gathered = {sizes(c.shape) for c in collectives(compiled) if c.kind == "all-gather"}
    assert not {where: shape for where, shape in split.items() if shape in gathered}
    assert any(c.kind == "all-reduce" for c in collectives(compiled))


def expect_the_table_to_say_what_a_device_holds(name: str, layout: str) -> None:
    gradients, _, _, mesh = on_mesh(name, layout)
    _, boxed, _ = job(name)
    rows = {line.split()[0]: line for line in sharding_table(boxed, mesh).splitlines()}
    for where, found in placements(boxed, mesh).items():
        leaf = functools.reduce(lambda tree, key: tree[key], where.split("/"), gradients)
        (held,) = {shard.data.nbytes for shard in leaf.addressable_shards}
        assert held == bytes_per_device(found, mesh), where
        assert f"{held:,}" in rows[where]
        assert ("tensor" in rows[where]) == ("tensor" in str(found.spec) or "tensor" in str(found.notes))
