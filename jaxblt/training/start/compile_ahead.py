"""A recipe's train step compiled before there is a run, for devices that need not be here."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.adapters import retrievals
from jaxblt.data.batch import Batch
from jaxblt.data.config import DataConfig
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.task_data import RowsConfig
from jaxblt.models.remat import Remat
from jaxblt.models.stack import StackConfig
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.parallel.rules import batch_sharding
from jaxblt.profiling.plan import StepMemory, step_memory
from jaxblt.training.packing import HEADROOM, mean_slots
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.base import base_shapes
from jaxblt.training.start.frozen import param_shapes
from jaxblt.training.start.setup import (
    Setup,
    boxed_params,
    entropy_history,
    make_setup,
    make_task,
    recipe_step,
)
from jaxblt.training.state import ENTROPY, Frozen
from pallas_kernels.runtime import compiling_for

PLATFORM = {"gpu": "cuda"}
"""What lowering calls a device's platform, where the names differ."""


def settle(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Fill in threshold and capacity without data; return the recipe and what was assumed to do so.

    No program's size depends on the threshold. Training calibrates the capacity; here it is `HEADROOM` times
    the block's mean number of patches, or where no mean is known the number that cannot overflow.
    """
    patcher, said = recipe.patcher, []
    if patcher is None:
        return recipe, said
    if patcher.has_threshold and patcher.threshold is None:
        patcher = replace(patcher, threshold=0.0)
    if patcher.capacity is None and recipe.bytes_per_patch is not None:
        mean = patcher.block_size / recipe.bytes_per_patch
        slots = mean_slots(recipe.model, recipe.data, patcher, recipe.bytes_per_patch)
        patcher = replace(patcher, capacity=slots)
        said.append(
            f"capacity {patcher.capacity} slots a block of {patcher.block_size} bytes: {HEADROOM} times the mean of "
            f"{mean:.0f} patches of {recipe.bytes_per_patch} bytes (training calibrates it)"
        )
    elif patcher.capacity is None:
        said.append(f"capacity {patcher.slots} slots a block, which cannot overflow (training calibrates it)")
    return replace(recipe, patcher=patcher), said


def at_context(recipe: Recipe, context: int, mesh: MeshConfig) -> Recipe:
    """Give the recipe rows of `context` bytes, on about as many bytes a step but at least one row a device group."""
    least = mesh.data * mesh.fsdp * recipe.train.accumulate
    rows = recipe.data.batch_size * recipe.data.seq_len // context // least * least
    data = replace(recipe.data, seq_len=context, batch_size=max(rows, least))
    return replace(recipe, data=data, mesh=mesh)


def with_remat[C](config: C, policy: Remat) -> C:
    """Give a model's config the policy in each of its stacks."""
    return with_stacks(config, lambda stack: replace(stack, remat=policy))


def with_stacks[C](config: C, change: Callable[[StackConfig], StackConfig]) -> C:
    """Change each stack in a model's config."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return config
    parts: dict[str, Any] = {
        field.name: with_stacks(getattr(config, field.name), change) for field in dataclasses.fields(config)
    }
    changed: Any = replace(config, **parts)
    if isinstance(changed, StackConfig):
        changed = change(changed)
    return changed


def abstract_batch(recipe: Recipe, mesh: Mesh) -> Batch:
    """Return shapes and shardings of the recipe's batches."""
    shape, sharding = (recipe.data.batch_size, recipe.data.seq_len), batch_sharding(mesh)

    def make() -> Batch:
        ids = jnp.zeros(shape, jnp.int32)
        entropies = None if recipe.data.entropies is None else jnp.zeros(shape, jnp.float32)
        history = entropy_history(recipe)
        before = None if history is None else jnp.zeros((shape[0], history.length), jnp.int32)
        documents = ids if isinstance(recipe.data, DataConfig) and retrievals(recipe.model) else None
        labels = _labels(recipe.data, shape)
        return Batch(ids, ids, ids, ids, ids, entropies, before, labels=labels, documents=documents)

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*sharding.spec[: x.ndim])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, jax.eval_shape(make))


def _labels(data: RowsConfig, shape: tuple[int, int]) -> Any:
    """Return labels of a batch of this shape; None for data without."""
    if isinstance(data, LabelledDataConfig):
        if data.tasks:
            kinds = {"number": jnp.float32, "class": jnp.int32}
            return {task.column: jnp.zeros(shape[:1], kinds[task.target]) for task in data.tasks}
        kind = jnp.float32 if data.target == "number" else jnp.int32
        return jnp.zeros(shape if data.target == "positions" else shape[:1], kind)
    return None if getattr(data, "labels", None) is None else jnp.zeros(shape[:1], jnp.int32)


def plan_step(recipe: Recipe, mesh: Mesh) -> StepMemory:
    """Compile the recipe's train step for the mesh's devices and say what memory it takes; nothing runs.

    Args:
      recipe: with nothing left open but parameters, see `settle`; `entropy_model` is set where entropies are computed.
      mesh: of devices that are here or of `jaxblt.profiling.targets`.

    Raises:
      ValueError: the recipe does not fit the mesh.
    """
    with compiling_for(mesh.devices.flat[0]):
        # Outside the mesh: a few constants are computed here, which devices that are absent cannot do.
        setup = _setup(recipe, mesh)
        state, batch = setup.abstract, abstract_batch(recipe, mesh)
        with jax.set_mesh(mesh):
            step: Any = recipe_step(setup)
            platform = mesh.devices.flat[0].platform
            lowered = step.trace(state, batch).lower(lowering_platforms=(PLATFORM.get(platform, platform),))
            compiled = lowered.compile()
    parts = {"parameters": state.params, "optimiser": state.opt_state, "batch": batch}
    parts |= {f"{name} model": tree for name, tree in state.frozen.items()}
    parts |= {} if state.scaling is None else {"scales": state.scaling}
    return step_memory(compiled, parts)


def _setup(recipe: Recipe, mesh: Mesh) -> Setup:
    base = base_shapes(recipe, lambda: boxed_params(make_task(recipe), recipe))
    if recipe.patcher is None or not recipe.patcher.needs_entropies or recipe.entropy_model is None:
        return make_setup(recipe, mesh, base)
    shapes = param_shapes(recipe.entropy_model)
    entropy = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    return make_setup(recipe, mesh, base | {ENTROPY: Frozen(entropy, "planned")})
