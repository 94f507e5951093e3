"""What a run says of itself before step 0: size, cost, devices, shardings, and which implementation each op gets."""

from dataclasses import astuple, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblt.adapters import check_sites, detach, split_params, without_index
from jaxblt.adapters.update.attach import describe_sites
from jaxblt.adapters.update.params import routers
from jaxblt.data.dataset import Dataset
from jaxblt.parallel.distributed import process_table
from jaxblt.parallel.folded import short_table
from jaxblt.parallel.mesh import off_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.training.experimental.hybrid import without_weights
from jaxblt.training.flops import count_params, countable_device, matmul_flops, peak_flops
from jaxblt.training.log.meter import Cost
from jaxblt.training.start.kept_step import KeptStep
from jaxblt.training.start.setup import Setup, make_task
from jaxblt.training.step import Task


def model_cost(task: Task, params: Any, length: int) -> Cost:
    """Count matmul FLOPs of training on a byte and on a patch: three times the forward pass of its program.

    With patches the program is counted at two numbers of slots. The part that grows with the slots is the patches'
    cost, so slots that hold no patch are free. The frozen entropy model, FFTs and recomputation are not counted. Of
    attention, the pairs of blocks are counted that its mask leaves something of.

    Args:
      task: the model and its patcher.
      params: of the model, or their shapes.
      length: bytes in a row.
    """
    if task.patcher is None:
        return Cost(_forward_flops(task, params, length, None) * 3 / length)
    blocks = -(-length // task.patcher.block_size)
    many = task.patcher.slots
    few = -(-many // 2)
    if many == few:
        return Cost(_forward_flops(task, params, length, many) * 3 / length)
    most, least = (_forward_flops(task, params, length, slots) for slots in (many, few))
    patch = (most - least) / (blocks * (many - few))
    return Cost(byte=3 * (most - patch * blocks * many) / length, patch=3 * patch)


def costs_by_length(setup: Setup, data: Dataset) -> dict[int, Cost]:
    """Count `model_cost` of full rows, and of the shorter ones of a length schedule."""
    lengths = data.row_lengths if data.settled else (setup.recipe.data.seq_len,)
    return {length: _cost(setup, length) for length in lengths}


def known_costs(kept: KeptStep, setup: Setup, data: Dataset) -> dict[int, Cost]:
    """Return `costs_by_length`, as an earlier process counted them if there was one."""
    found = kept.told(
        "costs", lambda: [(n, *astuple(cost)) for n, cost in costs_by_length(setup, data).items()]
    )
    return {length: Cost(*cost) for length, *cost in found}


def _cost(setup: Setup, length: int) -> Cost:
    """Count FLOPs of training; a frozen base costs two forward passes, not three: its weights have no gradients."""
    recipe, params = setup.recipe, nn.meta.unbox(setup.whole)
    cost = model_cost(setup.task, params, length)
    if recipe.base_run is None:
        return cost
    # Leave out what trains routers too: it asks for a bank, which the base does not have.
    bare = make_task(replace(recipe, model=detach(recipe.model), objective=without_weights(recipe.objective)))
    base = model_cost(bare, split_params(params)[0], length)
    return Cost(cost.byte - base.byte / 3, cost.patch - base.patch / 3)


def _forward_flops(task: Task, params: Any, length: int, slots: int | None) -> float:
    """Count FLOPs of one row of `length` bytes, its blocks having `slots` slots."""

    def forward(params: Any, ids: Any) -> Any:
        if task.patcher is None:
            return task.model.apply({"params": params}, ids)[0]
        entropies, cut = jnp.zeros(ids.shape, jnp.float32), task.cut_by(replace(task.patcher, capacity=slots))
        return cut.model.apply({"params": params}, ids, entropies=entropies)[0]

    # outside the mesh one row is enough
    with off_mesh(), jax.default_device(countable_device()):
        return matmul_flops(forward, params, jax.ShapeDtypeStruct((1, length), jnp.int32))


def patcher_line(patcher: PatcherConfig) -> str:
    """Tell rule, threshold with its margin or target, slots, and the bytes that the entropy model sees."""
    margin = "" if patcher.margin is None else f" (margin {patcher.margin:.1e} nats in the sample)"
    context = patcher.entropy_context
    seen = "" if context is None else f", entropies from {context // 2} to {context} bytes of context"
    rule = f"threshold {patcher.threshold}{margin}"
    if patcher.mode == "learned":
        rule = f"led to {patcher.target} bytes a patch"
    return f"{patcher.mode}, {rule}, {patcher.slots} slots a block{seen}"


def _adapters(setup: Setup) -> list[str]:
    """Tell sites, ranks and parameters of adapters; nothing for a model without."""
    if setup.recipe.base_run is None and not check_sites(setup.recipe.model):
        return []
    size = lambda tree: count_params(tree)[0]  # noqa: E731
    whole = without_index(setup.whole)
    counts = (size(tree) for tree in (setup.boxed, routers(setup.boxed), split_params(whole)[0], whole))
    return describe_sites(setup.recipe.model, *counts)


def describe(setup: Setup, data: Dataset, choices: list[str], cost: Cost) -> str:
    """Write the report, as lines of text."""
    recipe, mesh = setup.recipe, setup.mesh
    total, plain = count_params(setup.whole)
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    held = "" if data.num_bytes is None else f", {data.num_bytes:,} in the split"
    seen = recipe.train.steps * recipe.data.batch_size * recipe.data.seq_len
    attends = " and layers of attention" if setup.task.fp8 is not None and setup.task.fp8.attention else ""
    fp8 = f", {len(setup.sites)} products{attends} in FP8" if setup.sites else ""
    lines = [
        *_adapters(setup),
        f"{recipe.name}: {recipe.train.steps} steps of {recipe.data.batch_size} rows of {recipe.data.seq_len} bytes",
        f"parameters      {total:,} ({plain:,} without hash tables)",
        f"FLOPs per byte  {cost.per_byte():,.0f}, and {cost.patch:,.0f} a patch (matmuls, forward and backward)",
        f"bytes           {seen:,} to train on{held}; {seen / plain:.1f} a parameter",
        f"devices         {mesh.size} x {device.device_kind}, mesh {dict(mesh.shape)}, in {recipe.train.dtype}{fp8}",
        f"peak            {'unknown for this device' if peak is None else f'{peak / 1e12:,.0f} TFLOP/s a device'}",
    ]
    lines += setup.notes
    if recipe.patcher is not None:
        lines.append(f"patcher         {patcher_line(recipe.patcher)}")
    if jax.process_count() > 1:
        lines += ["", process_table()]
    return "\n".join(
        [*lines, "", "ops", *(f"  {line}" for line in choices), "", short_table(setup.boxed, mesh)]
    )
