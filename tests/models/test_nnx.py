"""Mixers and models as modules of Flax NNX, which `nnx.bridge.ToNNX` makes of them."""

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxblt.layers import Named
from jaxblt.mixers import MACConfig, MAGConfig, NeuralMemoryConfig, SlotMemoryConfig
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from tests.mixers.configs import ALL, VARIANTS
from tests.parameters import drawn
from tests.tolerances import assert_close

LENGTH = 24
MIXERS = {name: config for name, config in ALL.items() if name not in VARIANTS} | {
    "memory": NeuralMemoryConfig(dim=16, chunk_size=8),
    "mag": MAGConfig(dim=16, window=8, chunk_size=8),
    "mac": MACConfig(dim=16, chunk_size=8),
    "slots": SlotMemoryConfig(dim=16, slots=6, interval=8),
}
STACK = StackConfig(
    dim=8, num_layers=2, pattern=("H", "R"), mixers={"H": ALL["hyena_modal"], "R": ALL["recurrence"]}
)
LOCAL = StackConfig(dim=8, num_layers=1, pattern=("R",), mixers={"R": ALL["recurrence"]})
HASH = HashConfig(sizes=(3,), table_size=32)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bytes": ByteLMConfig(stack=STACK, hash=HASH).build,
    "patches": lambda: BLTConfig(
        encoder=LOCAL, latent=STACK, decoder=LOCAL, hash=HASH, bridge_heads=2, look_back=2
    ).build(patcher=PatcherConfig(mode="space", block_size=8, capacity=4)),
}


def inputs(name: str) -> tuple[nn.Module, Any]:
    """A module, and what it reads."""
    rng = np.random.default_rng(0)
    if name in MODELS:
        return MODELS[name](), jnp.asarray(rng.integers(4, 260, (2, LENGTH)), jnp.int32)
    config = MIXERS[name]
    return config.build(), jnp.asarray(rng.standard_normal((2, LENGTH, config.dim)), jnp.float32)


@pytest.mark.parametrize("mesh", [False, True])
def test_it_needs_no_mesh_and_takes_one(mesh: bool) -> None:
    """NNX looked for a mesh with axes of the logical names, and raised."""
    module, x = inputs("attention")
    with jax.set_mesh(make_mesh(data=2, seq=4)) if mesh else contextlib.nullcontext():
        made = nnx.eval_shape(lambda: nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x))
    kernels = [v for _, v in nnx.to_flat_state(nnx.state(made, nnx.Param))]
    assert {v.get_metadata("names")[0] for v in kernels} == {"embed", "heads"}
    assert {v.get_metadata("linen_meta_type") for v in kernels} == {Named}


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("name", [*MIXERS, *MODELS])
def test_it_is_what_linen_has_and_learns(name: str) -> None:
    module, x = inputs(name)
    variables = drawn(module, x)
    model = nnx.jit(lambda: nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x))()
    nnx.update(model, variables["params"])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> tuple[Any, Any]:
        def loss(model: Any) -> tuple[Any, Any]:
            y = model(x)[0]
            return jnp.mean(jnp.square(y - 1)), y

        (value, y), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return value, y

    (first, y), *others = [step(model, optimizer) for _ in range(4)]
    assert_close(y, jax.jit(module.apply)(variables, x)[0], n=LENGTH * y.shape[-1])
    assert others[-1][0] < first
