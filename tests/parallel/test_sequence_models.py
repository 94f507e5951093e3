"""Whole models over a split sequence: a train step gives what it gives on one device, and gathers no sequence."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.data.batch import Batch
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.models.bridge import visible_patches
from jaxblt.models.positions import document_positions
from jaxblt.parallel import batch_sharding, make_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig
from jaxblt.patching.patches import from_closed
from jaxblt.testing.collectives import collectives, spanning
from jaxblt.training.state import start
from jaxblt.training.step import Task, make_train_step
from tests.mixer_table import table
from tests.parallel.along import along
from tests.parameters import drawn
from tests.tolerances import assert_close

ROWS, BLOCKS, BLOCK = 2, 56, 11
LENGTH = BLOCKS * BLOCK
HASH = HashConfig(sizes=(3, 8), table_size=50)
PATCHER = PatcherConfig(mode="space", block_size=BLOCK)
LEARNED = PatcherConfig(mode="learned", block_size=BLOCK, target=3.0)


def stack(dim: int, pattern: str) -> StackConfig:
    hyena = HyenaConfig(dim=8, filter=ModalFilter(modes=3, max_timescale=64.0), segment_alignment=BLOCK)
    return StackConfig(
        dim=dim,
        num_layers=len(pattern),
        pattern=pattern,
        mlp_dim=20,
        mixers=table(
            hyena=hyena,
            attention=AttentionConfig(dim=8, num_heads=2, context_parallel="ring"),
            window=BLOCK,
            R=GatedRecurrenceConfig(dim=8),
        ),
        scan=False,
    )


def blt(encoder: str, latent: str, decoder: str) -> BLTConfig:
    return BLTConfig(
        encoder=stack(12, encoder),
        latent=stack(16, latent),
        decoder=stack(12, decoder),
        hash=HASH,
        bridge_heads=2,
    )


MODELS = {
    "byte_hyena": ByteLMConfig(stack=stack(12, "HR"), hash=HASH),
    "blt": blt("W", "H", "R"),
    "blt_attention": blt("W", "HA", "W"),
    "blt_hyena": blt("H", "RH", "S"),
    "blt_learned": dataclasses.replace(
        blt("W", "H", "R"),
        features_enter="output",
        router=BoundaryConfig(
            strategy="adaptive_hybrid", motifs=("ABC",), learned_motifs=2, motif_length=13, codon_phase=True
        ),
    ),
}


def segment_ids() -> np.ndarray:
    """Documents start at block edges; one row has padding between and behind."""
    ids = np.ones((ROWS, LENGTH), np.int32)
    ids[0, 3 * BLOCK :] = 2
    ids[0, 20 * BLOCK - 4 : 20 * BLOCK] = 0
    ids[0, 20 * BLOCK :] = 3
    ids[1, LENGTH - BLOCK - 3 :] = 0
    return ids


@functools.cache
def batch() -> Batch:
    draw, ids = np.random.default_rng(0), segment_ids()
    text = draw.choice(np.frombuffer(b"abc d e", np.uint8).astype(np.int32) + 4, (2, ROWS, LENGTH))
    positions = np.asarray(jax.jit(document_positions)(ids, ids))
    return Batch(*text, ids, positions, (ids > 0).astype(np.int32))  # pyright: ignore[reportArgumentType]


@functools.cache
def task(name: str) -> tuple[Task, Any]:
    patcher = LEARNED if name == "blt_learned" else PATCHER if "blt" in name else None
    model, rows = MODELS[name].build(patcher=patcher), batch()
    params = drawn(model, rows.inputs)["params"]
    if name == "blt_learned":
        params["router"] |= {"theta": jnp.full(1, 0.4), "log_tau": jnp.full(1, -1.0)}
    return Task(model), jax.device_get(params)


KEEP = optax.trace(decay=0.0)
"""Its state after a step is the step's gradient."""


@functools.lru_cache(maxsize=1)
def alone(name: str) -> Any:
    """The train step of a model, the state behind it on one device, and its metrics."""
    job, params = task(name)
    step = make_train_step(job, KEEP)
    return step, *jax.device_get(step(start(jax.tree.map(jnp.asarray, params), KEEP), batch()))


MESHES = {
    "blt": [(2, 2), (1, 4)],
    "byte_hyena": [(2, 2), (1, 4)],
    "blt_attention": [(1, 2), (1, 4)],
    "blt_hyena": [(1, 2), (1, 4)],
    "blt_learned": [(2, 2), (1, 4), (1, 8)],
}
"""Devices along `data` and `seq`."""


@pytest.mark.parametrize(
    ("name", "data", "seq"),
    [
        pytest.param(
            name,
            *mesh,
            marks=pytest.mark.slow(days=28, group="models over a split axis", turn=f"step of {name}"),
        )
        for name, meshes in MESHES.items()
        for mesh in meshes
    ],
)
def test_a_train_step_equals_that_of_one_device(name: str, data: int, seq: int) -> None:
    (step, expected, told), (_, params) = alone(name), task(name)
    mesh, rows = make_mesh(data=data, seq=seq, devices=jax.devices()[: data * seq]), batch()
    with jax.set_mesh(mesh):
        state = jax.device_put(start(params, KEEP), NamedSharding(mesh, PartitionSpec()))
        rows = jax.device_put(rows, batch_sharding(mesh))
        compiled = step.lower(state, rows).compile()  # pyright: ignore[reportFunctionMemberAccess]
        after, metrics = jax.device_get(compiled(state, rows))
    for figure in told:
        np.testing.assert_allclose(metrics[figure], told[figure], rtol=1e-5, err_msg=figure)
    for path, leaf in jax.tree.leaves_with_path(expected.opt_state.trace):
        found = functools.reduce(lambda tree, key: tree[key.key], path, after.opt_state.trace)
        assert_close(found, leaf, n=LENGTH * 16, what=jax.tree_util.keystr(path))
    found = collectives(compiled)
    kinds = ("all-gather", "all-to-all")
    assert not spanning(found, 7, kinds=kinds) + spanning(found, 11, kinds=kinds), found


def test_patches_before_a_stretch_come_from_as_far_as_they_lie() -> None:
    """Blocks of one patch each: the 4 before a block lie on several devices, and in its own document alone."""
    ids = segment_ids()[:, : 16 * BLOCK]
    closed = np.random.default_rng(1).random(ids.shape) < 0.3
    closed[:, 4 * BLOCK : 13 * BLOCK] = False
    patches = jax.jit(functools.partial(from_closed, block_size=BLOCK, capacity=6))(closed, ids)
    z = np.random.default_rng(2).standard_normal((ROWS, 16, 6, 5)).astype(np.float32)
    dy = np.random.default_rng(3).standard_normal((ROWS, 16, 4 + 6, 5)).astype(np.float32)

    def fn(_: Any, z: Any, patches: Any, dy: Any) -> Any:
        def read(z: Any) -> tuple[Any, Any]:
            keys, latest, valid = visible_patches(z, patches, look_back=4, causal=True)
            return jnp.sum(jnp.where(valid[..., None], keys, 0.0) * dy), (latest, valid)

        (_, seen), gradient = jax.value_and_grad(read, has_aux=True)(z)
        return seen, gradient

    expected = jax.device_get(jax.jit(fn)(0, z, patches, dy))
    found, compiled = along(fn, np.zeros(()), (z, patches, dy), seq=8)
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    assert_close(found[1], expected[1], n=8)
    assert not spanning(collectives(compiled), 16)


def test_positions_count_from_documents_on_other_devices() -> None:
    ids = segment_ids()[:, : 24 * BLOCK]
    found, compiled = along(lambda _, ids: document_positions(ids, ids), np.zeros(()), (ids,), seq=8)
    np.testing.assert_array_equal(found, jax.jit(document_positions)(ids, ids))
    assert not spanning(collectives(compiled), BLOCK)


@pytest.mark.slow(days=28, group="costly")
def test_blocks_that_do_not_divide_are_named() -> None:
    job, params = task("blt")
    rows = jax.tree.map(lambda x: x[:, : 21 * BLOCK], batch())
    with (
        jax.set_mesh(make_mesh(data=2, seq=4)),
        pytest.raises(ValueError, match=r"21 blocks of 11 bytes.*4 devices"),
    ):
        jax.eval_shape(make_train_step(job, KEEP), start(params, KEEP), rows)
