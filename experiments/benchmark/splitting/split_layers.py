"""A layer with the sequence split over devices: seconds, memory, and the speed-up."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmark.figures.programs import ratio, run_if_it_fits, time_on_devices
from experiments.benchmark.splitting.kinds import Kind, Passes
from jaxblt.mixers import (
    AttentionConfig,
    ExplicitFilter,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    HyenaConfig,
    ImplicitFilter,
    Mamba2Config,
    MixerConfig,
    ModalFilter,
    SparseAttentionConfig,
    StateEngineConfig,
)
from jaxblt.models import StackConfig
from jaxblt.models.stack import Stack
from jaxblt.parallel import make_mesh, replicated
from pallas_kernels.attention.rules import ByBlock, Strided


def meshes(devices: int) -> list[Mesh]:
    """Return a mesh of one device, and the sequence over all, which may be one too."""
    return [make_mesh(data=1, seq=n, devices=jax.devices()[:n]) for n in (1, devices)]


def layer(
    kind: Kind, tokens: int, dim: int, devices: int, trials: int, passes: Passes = "both"
) -> dict[str, Any]:
    """Time one block with its MLP, bf16, one document, on one device and on all; forward, or with gradients.

    speed_up is the median time on one device over that on all; None where either runs out of memory.
    """
    mixers = {kind: mixer(kind, tokens, dim)}
    stack = StackConfig(dim=dim, num_layers=1, pattern=(kind,), mixers=mixers, scan=False)
    module = Stack(stack, jnp.bfloat16)
    run = partial(_layer_on, module, tokens=tokens, dim=dim, trials=trials, passes=passes)
    one, many = (run_if_it_fits(partial(run, mesh)) for mesh in meshes(devices))
    shape = {"filter": kind, "tokens": tokens, "dim": dim, "devices": devices, "passes": passes}
    return shape | {"one": one, "all": many, "speed_up": ratio(one, many)}


def mixer(kind: Kind, tokens: int, dim: int) -> MixerConfig:
    """Return the mixer of a layer."""
    filters = {
        "modal": ModalFilter(max_timescale=float(tokens)),
        "explicit": ExplicitFilter(taps=128),
        "implicit": ImplicitFilter(filter_len=tokens),
    }
    if kind in filters:
        return HyenaConfig(dim=dim, filter=filters[kind], packed=False)
    heads = max(dim // 128, 1)
    if kind == "gated_delta_net":
        return GatedDeltaNetConfig(dim=dim, num_heads=heads)
    if kind == "gated_linear_attention":
        return GatedLinearAttentionConfig(dim=dim, num_heads=heads)
    if kind == "every_tenth_block":
        rule = ByBlock(Strided(10), 128)
        return AttentionConfig(dim, heads, max(heads // 4, 1), rule=rule, packed=False)
    if kind == "sparse_attention":
        return SparseAttentionConfig(dim, heads, max(heads // 4, 1), predictor=None)
    if kind == "mamba2":
        return Mamba2Config(dim=dim)
    return StateEngineConfig(dim=dim, num_heads=heads, num_slots=64, packed=False)


def _layer_on(
    module: nn.Module, mesh: Mesh, tokens: int, dim: int, trials: int, passes: Passes
) -> dict[str, Any]:
    def run(params: Any, x: Any, dy: Any) -> Any:
        if passes == "forward":
            return module.apply(params, x)[0]
        y, back = jax.vjp(lambda p, x: module.apply(p, x)[0], params, x)  # pyright: ignore[reportIndexIssue]
        return y, back(dy)

    def inputs(key: Any) -> Any:
        return tuple(jax.random.normal(k, (1, tokens, dim), jnp.bfloat16) for k in jax.random.split(key))

    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec(None, "seq"))
        like = jnp.zeros((1, 8 * mesh.size, dim), jnp.bfloat16)
        params = nn.meta.unbox(jax.jit(module.init, out_shardings=replicated(mesh))(jax.random.key(0), like))
        x, dy = jax.jit(inputs, out_shardings=split)(jax.random.key(1))
        compiled = jax.jit(run).lower(params, x, dy).compile()
        return time_on_devices(compiled, lambda: compiled(params, x, dy), trials)
