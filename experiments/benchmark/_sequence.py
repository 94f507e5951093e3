"""A layer and a train step with the sequence split over devices: seconds, memory, and the same result."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmark._schema import timed
from experiments.benchmark.sequence_parallel import Kind
from jaxblt.data import Batch, load_sample, vocab
from jaxblt.mixers import (
    ExplicitFilter,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    HyenaConfig,
    ImplicitFilter,
    Mamba2Config,
    MixerConfig,
    ModalFilter,
    StateEngineConfig,
)
from jaxblt.models import BLTConfig, StackConfig
from jaxblt.models.stack import Stack
from jaxblt.parallel import batch_sharding, make_mesh, replicated
from jaxblt.patching import PatcherConfig
from jaxblt.profiling import measure
from jaxblt.training.evaluate import make_eval_step
from jaxblt.training.meter import peak_memory
from jaxblt.training.optimizer import AdamWConfig, make_optimizer
from jaxblt.training.state import TrainState, start
from jaxblt.training.step import Task, make_train_step


def meshes(devices: int) -> list[Mesh]:
    """One device alone, and the sequence over all, which may be one too."""
    return [make_mesh(data=1, seq=n, devices=jax.devices()[:n]) for n in (1, devices)]


def layer(kind: Kind, tokens: int, dim: int, devices: int, trials: int) -> dict[str, Any]:
    """Forward and backward of one block with its MLP, bf16, one document, on one device and on all.

    speed_up is the median time on one device over that on all; None where either runs out of memory.
    """
    mixers = {kind: mixer(kind, tokens, dim)}
    stack = StackConfig(dim=dim, num_layers=1, pattern=(kind,), mixers=mixers, scan=False)
    module = Stack(stack, jnp.bfloat16)
    run = partial(_layer_on, module, tokens=tokens, dim=dim, trials=trials)
    one, many = (fitting(partial(run, mesh)) for mesh in meshes(devices))
    shape = {"filter": kind, "tokens": tokens, "dim": dim, "devices": devices}
    return shape | {"one": one, "all": many, "speed_up": ratio(one, many)}


def mixer(kind: Kind, tokens: int, dim: int) -> MixerConfig:
    """The mixer of a layer."""
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
    if kind == "mamba2":
        return Mamba2Config(dim=dim)
    return StateEngineConfig(dim=dim, num_heads=heads, num_slots=64, packed=False)


def _layer_on(module: nn.Module, mesh: Mesh, tokens: int, dim: int, trials: int) -> dict[str, Any]:
    def passes(params: Any, x: Any, dy: Any) -> Any:
        y, back = jax.vjp(lambda p, x: module.apply(p, x)[0], params, x)  # pyright: ignore[reportIndexIssue]
        return y, back(dy)

    def inputs(key: Any) -> Any:
        return tuple(jax.random.normal(k, (1, tokens, dim), jnp.bfloat16) for k in jax.random.split(key))

    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec(None, "seq"))
        like = jnp.zeros((1, 8 * mesh.size, dim), jnp.bfloat16)
        params = nn.meta.unbox(jax.jit(module.init, out_shardings=replicated(mesh))(jax.random.key(0), like))
        x, dy = jax.jit(inputs, out_shardings=split)(jax.random.key(1))
        compiled = jax.jit(passes).lower(params, x, dy).compile()
        return timed_on(compiled, lambda: compiled(params, x, dy), trials)


def step(
    config: BLTConfig, length: int, devices: int, trials: int, *, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """A BLT train step on one sequence of `length` bytes over all devices.

    Patches are static, four bytes each, so that all runs cut the same; parameters are drawn from one key.
    """
    run = partial(_step_on, config, _patcher(length // devices**2), meshes(devices)[1])
    return _found(length, devices, fitting(partial(run, length, dtype, trials)))


def forward(
    config: BLTConfig, length: int, devices: int, trials: int, *, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """The loss of one sequence of `length` bytes over all devices, as `step` has it, without gradients."""
    run = partial(_forward_on, config, _patcher(length // devices**2), meshes(devices)[1])
    return _found(length, devices, fitting(partial(run, length, dtype, trials)))


def _found(length: int, devices: int, many: dict[str, Any]) -> dict[str, Any]:
    found = {"bytes": length, "devices": devices, "all": many}
    if "seconds" in many:
        found["bytes_per_second"] = length / many["seconds"]["median"]
    return found


def compared(
    config: BLTConfig, many: dict[str, Any], trials: int, *, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """What `step` found, and one device on its share of the bytes.

    efficiency is the median time of one device on length / devices bytes over that of all on the whole: 1 where a
    layer's work grows with the length and exchanges cost nothing; attention's work grows faster. At the share's length
    the loss of the first step is compared, of all devices against one.
    """
    devices, share = many["devices"], many["bytes"] // many["devices"]
    patcher = _patcher(share // devices)
    alone, split = meshes(devices)
    one = _step_on(config, patcher, alone, share, dtype, trials)
    check = _step_on(config, patcher, split, share, dtype, None)
    difference = abs(check["first_loss"] - one["first_loss"]) / one["first_loss"]
    return many | {
        "check": {"bytes": share, "first_loss": check["first_loss"], "relative": difference},
        "one_on_its_share": one,
        "efficiency": ratio(one, many["all"]),
    }


def _patcher(longest_block: int) -> PatcherConfig:
    return PatcherConfig(mode="static", patch_size=4, block_size=min(4096, longest_block))


def _step_on(
    config: BLTConfig, patcher: PatcherConfig, mesh: Mesh, length: int, dtype: Any, trials: int | None
) -> dict[str, Any]:
    """The loss of the first step, and unless `trials` is None the time of those that train on."""
    task = Task(config.build(dtype=dtype, patcher=patcher), packed=False)
    with jax.set_mesh(mesh):
        adamw = partial(make_optimizer, AdamWConfig(warmup_steps=0), 1000)
        optimizer, state, batch = _begin(task, patcher, mesh, length, adamw)
        held, train = [state], make_train_step(task, optimizer)
        compiled: Any = train.lower(held[0], batch).compile()  # pyright: ignore[reportFunctionMemberAccess]

        def run() -> Any:
            held[0], metrics = compiled(held[0], batch)
            return metrics

        first = {"first_loss": float(run()["loss"])}
        return first if trials is None else first | timed_on(compiled, run, trials)


def _forward_on(
    config: BLTConfig, patcher: PatcherConfig, mesh: Mesh, length: int, dtype: Any, trials: int
) -> dict[str, Any]:
    """The loss and its time."""
    task = Task(config.build(dtype=dtype, patcher=patcher), packed=False)
    with jax.set_mesh(mesh):
        _, state, batch = _begin(task, patcher, mesh, length, lambda _: optax.identity())
        evaluate: Any = make_eval_step(task)
        compiled: Any = evaluate.lower(state, batch, 0).compile()

        def run() -> Any:
            return compiled(state, batch, 0)

        loss = float(run()["nll"]) / length
        return {"loss": loss} | timed_on(compiled, run, trials)


def _begin(
    task: Task, patcher: PatcherConfig, mesh: Mesh, length: int, make: Callable[[Any], Any]
) -> tuple[Any, TrainState, Batch]:
    """Optimiser, first state and batch."""
    batch = jax.device_put(_text(length), batch_sharding(mesh))
    boxed = _parameters(task, patcher, mesh)
    optimizer = make(boxed)
    begin = jax.jit(lambda p: start(p, optimizer), out_shardings=replicated(mesh), donate_argnums=0)
    return optimizer, begin(nn.meta.unbox(boxed)), batch


def _parameters(task: Task, patcher: PatcherConfig, mesh: Mesh) -> Any:
    ids = jnp.zeros((1, patcher.block_size * mesh.size), jnp.int32)
    return jax.jit(task.model.init, out_shardings=replicated(mesh))(jax.random.key(0), ids)["params"]


def _text(length: int) -> Batch:
    """One row of the embedded book, from the start again where it ends."""
    ids = np.resize(vocab.encode(load_sample("book")), length + 1).astype(np.int32)[None]
    ones = np.ones((1, length), np.int32)
    positions = np.arange(length, dtype=np.int32)[None]
    return Batch(*(jnp.asarray(a) for a in (ids[:, :-1], ids[:, 1:], ones, positions, ones)))


def timed_on(compiled: Any, call: Callable[[], Any], trials: int) -> dict[str, Any]:
    """Bytes that the compiler planned for a device, seconds a call, and the allocator's peak, where it tells one.

    The peak is of the process so far: this program's only where it is the largest that has run.
    """
    plan = compiled.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    taken = timed(measure(call, trials=trials, warmup=1, method="calls"))
    return {"planned_bytes": int(planned - plan.alias_size_in_bytes), **peak_memory(), "seconds": taken}


def fitting(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `call` returns, or what the allocator said."""
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"out_of_memory": str(error).splitlines()[0]}


def ratio(one: dict[str, Any], many: dict[str, Any]) -> float | None:
    if "seconds" not in one or "seconds" not in many:
        return None
    return one["seconds"]["median"] / many["seconds"]["median"]
