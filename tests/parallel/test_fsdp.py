"""Rows and parameters split over `fsdp`: weights travel, activations stay with their rows."""

import functools
import math
from dataclasses import astuple, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.data.batch import Batch
from jaxblt.mixers import AttentionConfig, HyenaConfig, MixerConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.parallel import MeshConfig, batch_sharding, state_shardings
from jaxblt.parallel.constraints import by_token, whole_weight
from jaxblt.parallel.rules import placements
from jaxblt.patching import PatcherConfig
from jaxblt.profiling.collectives import Collective
from jaxblt.testing.collectives import collectives, crossed_axes
from jaxblt.training.state import start
from jaxblt.training.step import Task, make_train_step
from tests.mixers import configs
from tests.parameters import drawn
from tests.tolerances import relative_error

PRIME = 11
"""Divides every count of tokens here, also of a device's share, and no size of a parameter."""
ROWS, BLOCK = 8, 4 * PRIME
LENGTH = 4 * BLOCK
WIDTH = 24
PATCHER = PatcherConfig(mode="static", block_size=BLOCK, patch_size=4)
HASH = HashConfig(sizes=(3, 8), table_size=50)
KEEP = optax.trace(decay=0.0)
"""Its state after a step is the step's gradient."""
MESHES = {
    "fsdp": MeshConfig(data=1, fsdp=2),
    "data": MeshConfig(data=2, fsdp=2),
    "seq": MeshConfig(data=1, fsdp=2, seq=2),
    "tensor": MeshConfig(data=1, fsdp=2, tensor=2),
    "all": MeshConfig(data=1, fsdp=2, seq=2, tensor=2),
    "eight": MeshConfig(data=1, fsdp=8),
}


def stack(dim: int, *mixers: MixerConfig, **options: Any) -> StackConfig:
    names = tuple(f"mixer_{i}" for i in range(len(mixers)))
    table = dict(zip(names, mixers, strict=True))
    return StackConfig(
        dim=dim, num_layers=len(names), pattern=names, mixers=table, mlp_dim=40, **{"scan": False, **options}
    )


ATTENTION = AttentionConfig(dim=WIDTH, num_heads=2)
WINDOW = replace(ATTENTION, window=BLOCK)
HYENA = HyenaConfig(dim=WIDTH, filter=ModalFilter(modes=3, max_timescale=64.0))
MODELS: dict[str, Any] = {
    "byte_lm": ByteLMConfig(stack=stack(WIDTH, HYENA, ATTENTION), hash=HASH),
    "scanned": ByteLMConfig(stack=stack(WIDTH, ATTENTION, scan=True, remat="dots"), tie_head=True),
    "blt": BLTConfig(
        encoder=stack(WIDTH, WINDOW),
        latent=stack(40, HYENA, ATTENTION),
        decoder=stack(WIDTH, WINDOW),
        hash=HASH,
        bridge_heads=2,
    ),
} | {
    name: ByteLMConfig(stack=stack(WIDTH, replace(mixer, dim=WIDTH), causal=mixer.causal))
    for name, mixer in configs.ALL.items()
}
ALWAYS = (("scanned", "fsdp"), ("byte_lm", "all"))
TURNS = [
    *((name, layout) for name in ("byte_lm", "blt") for layout in MESHES if (name, layout) not in ALWAYS),
    *((name, "all") for name in configs.ALL),
]


@functools.cache
def job(name: str) -> tuple[Task, Any, Batch]:
    """The task, its boxed parameters and a batch."""
    text = np.random.default_rng(0).integers(4, 20, (2, ROWS, LENGTH)).astype(np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    model = MODELS[name].build(patcher=PATCHER if name == "blt" else None)
    boxed = drawn(model, jax.device_put(text[0]), boxed=True)["params"]
    places = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ones.shape)
    return Task(model, packed=False), boxed, Batch(*map(jax.device_put, (*text, ones, places, ones)))


def compile_step(name: str, mesh: Mesh) -> tuple[Any, Any, Any]:
    """The compiled step on the mesh, and what it is called with."""
    task, boxed, batch = job(name)
    state = start(jax.device_get(nn.meta.unbox(boxed)), KEEP)
    shardings = state_shardings(state, boxed, mesh)
    with jax.set_mesh(mesh):
        state, rows = jax.device_put(state, shardings), jax.device_put(batch, batch_sharding(mesh))
        step: Any = make_train_step(task, KEEP, shardings=shardings)
        return step.lower(state, rows).compile(), state, rows


def expect_tokens_to_stay(name: str, mesh: Mesh, compiled: Any) -> None:
    """Along data and fsdp move parameters alone, and each that fsdp splits is gathered."""
    placed = placements(job(name)[1], mesh).values()
    moved = [c for c in collectives(compiled) if crossed_axes(c, mesh) & {"data", "fsdp"}]
    assert not [c for c in moved if elements(c) and elements(c) % PRIME == 0]
    gathered = {elements(c) for c in moved if c.kind == "all-gather"}
    for shape in (place.shape for place in placed if "fsdp" in place.spec):
        whole = math.prod(shape[1:] if name == "scanned" and len(shape) > 2 else shape)
        assert gathered & {whole, whole // 2}, (shape, gathered)


def elements(array: Collective) -> int:
    return math.prod(array.shape)


@pytest.mark.slow(days=28, group="costly", turn="parallel/test_fsdp")
@pytest.mark.parametrize(("name", "layout"), ALWAYS)
def test_a_step_equals_that_of_one_device_and_moves_no_tokens(name: str, layout: str) -> None:
    mesh, alone = (build(sizes) for sizes in (MESHES[layout], MeshConfig(data=1)))
    compiled, *given = compile_step(name, mesh)
    expect_tokens_to_stay(name, mesh, compiled)
    after, metrics = compiled(*given)
    other, *given = compile_step(name, alone)
    expected, same = other(*given)
    assert float(metrics["loss"]) == pytest.approx(float(same["loss"]), rel=1e-5)
    found, wanted = (jax.device_get(state.opt_state.trace) for state in (after, expected))
    errors = jax.tree.map(relative_error, found, wanted)
    assert max(jax.tree.leaves(errors)) < 1e-5, errors


@pytest.mark.slow(days=28, group="models whose parameters fsdp splits")
@pytest.mark.parametrize(("name", "layout"), TURNS)
def test_a_step_moves_no_tokens_along_fsdp(name: str, layout: str) -> None:
    mesh = build(MESHES[layout])
    expect_tokens_to_stay(name, mesh, compile_step(name, mesh)[0])


def build(sizes: MeshConfig) -> Mesh:
    return sizes.build(jax.devices()[: math.prod(astuple(sizes))])


def test_activations_lie_by_row_and_stretch_and_weights_whole() -> None:
    """What an axis does not divide stays whole; without a mesh nothing is asked."""
    mesh = build(MESHES["all"])

    def fn(x: Any, odd: Any, weight: Any) -> Any:
        return by_token(x), by_token(odd), whole_weight(weight, ("embed", "mlp"))

    x, odd, weight = jnp.ones((4, 6, 3)), jnp.ones((3, 1, 3)), jnp.ones((4, 6))
    with jax.set_mesh(mesh):
        weight = jax.device_put(weight, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
        found = jax.jit(fn)(x, odd, weight)
    specs = [PartitionSpec("fsdp", "seq"), PartitionSpec(), PartitionSpec(None, "tensor")]
    for array, spec in zip(found, specs, strict=True):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), spec
    assert str(jax.make_jaxpr(fn)(x, odd, weight)).count("sharding_constraint") == 0
