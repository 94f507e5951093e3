"""A train step of the model of `books` with one sequence split over devices, and its loss without gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.benchmark.figures.programs import ratio, run_if_it_fits, time_on_devices
from experiments.benchmark.splitting.split_layers import meshes
from jaxblt.data import Batch, load_sample, vocab
from jaxblt.models import BLTConfig
from jaxblt.parallel import batch_sharding, replicated
from jaxblt.patching import PatcherConfig
from jaxblt.training.evaluate import make_eval_step
from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer
from jaxblt.training.state import TrainState, start
from jaxblt.training.step import Task, make_train_step


def step(
    config: BLTConfig, length: int, devices: int, trials: int, *, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """Time a BLT train step on one sequence of `length` bytes over all devices.

    Patches are static, four bytes each, so that all runs cut the same; parameters are drawn from one key.
    """
    run = partial(_step_on, config, _patcher(length // devices**2), meshes(devices)[1])
    return _found(length, devices, run_if_it_fits(partial(run, length, dtype, trials)))


def forward(
    config: BLTConfig, length: int, devices: int, trials: int, *, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """Time the loss of one sequence of `length` bytes over all devices, without gradients.

    It is the loss of `step`.
    """
    run = partial(_forward_on, config, _patcher(length // devices**2), meshes(devices)[1])
    return _found(length, devices, run_if_it_fits(partial(run, length, dtype, trials)))


def _found(length: int, devices: int, many: dict[str, Any]) -> dict[str, Any]:
    found = {"bytes": length, "devices": devices, "all": many}
    if "seconds" in many:
        found["bytes_per_second"] = length / many["seconds"]["median"]
    return found


def compared(
    config: BLTConfig, many: dict[str, Any], trials: int, *, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """Return what `step` found, and one device on its share of the bytes.

    efficiency is the median time of one device on length / devices bytes over that of all on the whole. It is 1 where a
    layer's work grows with the length and exchanges cost nothing. Attention's work grows faster. At the share's length
    the loss and the gradient's norm of the first step are compared, of all devices against one.
    """
    devices, share = many["devices"], many["bytes"] // many["devices"]
    patcher = _patcher(share // devices)
    alone, split = meshes(devices)
    one = _step_on(config, patcher, alone, share, dtype, trials)
    check = _step_on(config, patcher, split, share, dtype, None)
    off = {name: abs(check[name] - one[name]) / one[name] for name in ("first_loss", "first_grad_norm")}
    relative = {"relative": off["first_loss"], "relative_grad_norm": off["first_grad_norm"]}
    return many | {
        "check": {"bytes": share, **check, **relative},
        "one_on_its_share": one,
        "efficiency": ratio(one, many["all"]),
    }


def _patcher(longest_block: int) -> PatcherConfig:
    return PatcherConfig(mode="static", patch_size=4, block_size=min(4096, longest_block))


def _step_on(
    config: BLTConfig, patcher: PatcherConfig, mesh: Mesh, length: int, dtype: Any, trials: int | None
) -> dict[str, Any]:
    """Return the loss of the first step, and unless `trials` is None the time of those that train on."""
    task = Task(config.build(dtype=dtype, patcher=patcher), packed=False)
    with jax.set_mesh(mesh):
        adamw = partial(make_optimizer, AdamWConfig(warmup_steps=0), 1000)
        optimizer, state, batch = _begin(task, patcher, mesh, length, adamw)
        held, train = [state], make_train_step(task, optimizer)
        compiled: Any = train.lower(held[0], batch).compile()  # pyright: ignore[reportFunctionMemberAccess]

        def run() -> Any:
            held[0], metrics = compiled(held[0], batch)
            return metrics

        metrics = run()
        first = {"first_loss": float(metrics["loss"]), "first_grad_norm": float(metrics["grad_norm"])}
        return first if trials is None else first | time_on_devices(compiled, run, trials)


def _forward_on(
    config: BLTConfig, patcher: PatcherConfig, mesh: Mesh, length: int, dtype: Any, trials: int
) -> dict[str, Any]:
    """Return the loss and its time."""
    task = Task(config.build(dtype=dtype, patcher=patcher), packed=False)
    with jax.set_mesh(mesh):
        _, state, batch = _begin(task, patcher, mesh, length, lambda _: optax.identity())
        evaluate: Any = make_eval_step(task)
        compiled: Any = evaluate.lower(state, batch, 0).compile()

        def run() -> Any:
            return compiled(state, batch, 0)

        loss = float(run()["nll"]) / length
        return {"loss": loss} | time_on_devices(compiled, run, trials)


def _begin(
    task: Task, patcher: PatcherConfig, mesh: Mesh, length: int, make: Callable[[Any], Any]
) -> tuple[Any, TrainState, Batch]:
    """Return optimiser, first state and batch."""
    batch = jax.device_put(_text(length), batch_sharding(mesh))
    boxed = _parameters(task, patcher, mesh)
    optimizer = make(boxed)
    begin = jax.jit(lambda p: start(p, optimizer), out_shardings=replicated(mesh), donate_argnums=0)
    return optimizer, begin(nn.meta.unbox(boxed)), batch


def _parameters(task: Task, patcher: PatcherConfig, mesh: Mesh) -> Any:
    ids = jnp.zeros((1, patcher.block_size * mesh.size), jnp.int32)
    return jax.jit(task.model.init, out_shardings=replicated(mesh))(jax.random.key(0), ids)["params"]


def _text(length: int) -> Batch:
    """Return one row of the embedded book, from the start again where it ends."""
    ids = np.resize(vocab.encode(load_sample("book")), length + 1).astype(np.int32)[None]
    ones = np.ones((1, length), np.int32)
    positions = np.arange(length, dtype=np.int32)[None]
    return Batch(*(jnp.asarray(a) for a in (ids[:, :-1], ids[:, 1:], ones, positions, ones)))
