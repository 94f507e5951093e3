"""From a recipe to what the loop needs: mesh, model, optimiser, shardings and the first state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import Array

from jaxblt.adapters import check_sites, detach, retrievals
from jaxblt.adapters.code.first_code import check_first_codes
from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.data.history import History
from jaxblt.data.pipeline import make_dataset
from jaxblt.data.task_data import RowsConfig
from jaxblt.parallel.distributed import local_rows, make_global
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout, layout_of
from jaxblt.parallel.rules import batch_sharding, replicated, state_shardings
from jaxblt.parallel.sequence import SEQ_AXIS
from jaxblt.precision.config import Fp8Config
from jaxblt.precision.device import check_fp8
from jaxblt.precision.loss_scale import first_loss_scale
from jaxblt.precision.scaling import AMAX, LOSS
from jaxblt.precision.sites import find_sites, first_amax
from jaxblt.random_keys import make_key
from jaxblt.show import show
from jaxblt.training.experimental.acting import keep_routers
from jaxblt.training.experimental.hybrid import Hybrid, HybridNextByte
from jaxblt.training.metrics import Metrics
from jaxblt.training.objectives.balance import balanced
from jaxblt.training.objectives.reference import Reference
from jaxblt.training.optimisers.adamw import make_optimizer
from jaxblt.training.optimisers.schedule import for_rows, make_schedule
from jaxblt.training.packing import check_alignment, has_full_rows, promise_rows
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.base import at_start, trained_part
from jaxblt.training.start.draw_params import draw_at_once, draw_traced, only
from jaxblt.training.state import BASE, ENTROPY, REFERENCE, Frozen, TrainState, start
from jaxblt.training.step import Task, make_train_step
from pallas_kernels.runtime import current_device

HISTORY_MULTIPLE = 128
"""Of which the length of a history is one, so that rows with it divide among devices as those without."""


MANY = 64
"""Parameter arrays from which they are drawn by kind: a smaller model's one program compiles sooner."""

REPLICATED = (ENTROPY,)
"""Frozen trees that lie whole on every device. An entropy model is small, and each device runs it on rows of its own:
split parameters would have to be gathered in every step."""


@dataclass(frozen=True)
class Setup:
    """The static side of a run.

    Attributes:
      recipe: with nothing left open.
      mesh: of all processes' devices.
      task: model, objective and patcher.
      optimizer, schedule: of the parameters, and its learning rate by update.
      whole: shapes of the model's parameters with their logical axis names.
      boxed: of those that are trained; the others are the frozen base's.
      abstract: shapes and shardings of the state.
      notes: lines for the report on where the parameters come from.
      sites: paths of the products and layers of attention that run in FP8.
      init: the program that draws the leaves of `whole`, which `make_setup` traced for their shapes.
    """

    recipe: Recipe
    mesh: Mesh
    task: Task
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    whole: Any
    boxed: Any
    abstract: TrainState
    notes: tuple[str, ...] = ()
    sites: frozenset[tuple[str, ...]] = frozenset()
    init: core.ClosedJaxpr | None = None

    __repr__ = show

    @property
    def eval_task(self) -> Task:
        """The task on evaluation rows, which may end in padding."""
        return replace(self.task, packed=True)

    @property
    def layout(self) -> SequenceLayout:
        """Of the bytes of a row."""
        return layout_of(self.recipe.model)

    @property
    def shardings(self) -> Any:
        """Of the state."""
        return jax.tree.map(lambda x: x.sharding, self.abstract)


def make_task(recipe: Recipe) -> Task:
    """Make what the recipe's steps compute, by models that know how documents lie in the rows of its data."""
    dtype = recipe.train.compute_dtype
    model, entropy_model = (
        promise_rows(config, recipe.data, recipe.patcher) for config in (recipe.model, recipe.entropy_model)
    )
    return Task(
        model=model.build(dtype=dtype, patcher=recipe.patcher),
        objective=recipe.objective,
        reference=_reference(recipe),
        hybrid=_hybrid(recipe),
        entropy_model=None if entropy_model is None else entropy_model.build(dtype=dtype),
        packed=not has_full_rows(recipe.data),
        fp8=recipe.train.fp8 if recipe.train.precision == "fp8" else None,
        loss_scale=recipe.train.loss_scale if recipe.train.dtype == "float16" else None,
    )


def _reference(recipe: Recipe) -> Reference | None:
    """Make the model that predictions are compared with, once its config is known."""
    told = recipe.reference
    config = None if told is None else detach(recipe.model) if told.run is None else told.model
    if told is None or config is None:
        return None
    config = promise_rows(config, recipe.data, recipe.patcher)
    model = config.build(dtype=recipe.train.compute_dtype, patcher=recipe.patcher)
    return Reference(model, BASE if told.run is None else REFERENCE, told.weight, told.every)


def _hybrid(recipe: Recipe) -> Hybrid | None:
    """Make the weights of the loss's parts, with the model that rewards are measured from."""
    if not isinstance(recipe.objective, HybridNextByte):
        return None
    base = promise_rows(detach(recipe.model), recipe.data, recipe.patcher)
    return Hybrid(recipe.objective, base.build(dtype=recipe.train.compute_dtype, patcher=recipe.patcher))


def make_setup(
    recipe: Recipe, mesh: Mesh, frozen: Mapping[str, Frozen] | None = None, notes: tuple[str, ...] = ()
) -> Setup:
    """Build everything from shapes alone; nothing is computed on the devices.

    Args:
      recipe: with nothing left open.
      mesh: of all devices.
      frozen: the frozen trees, or their shapes.
      notes: for the report.

    Raises:
      ValueError: sites of adapters are as `check_sites` refuses them, rows end before a router's first code, or the
        device, the model or the rows are not for FP8.
    """
    task = make_task(recipe)
    check_sites(recipe.model)
    trace, sites = lambda: check_first_codes(lambda: _traced_init(task, recipe)), frozenset()
    if task.fp8 is None:
        init, whole = trace()
    else:
        check_fp8(current_device())
        _check_full_rows(task.fp8, task.packed)
        sites, (init, whole) = find_sites(task.fp8, trace)
    boxed = trained_part(recipe, whole)
    stacks = getattr(task.model, "stacks", {})
    rates = for_rows(recipe.optimizer, recipe.data.batch_size)
    optimizer = make_optimizer(rates, recipe.train.steps, boxed, stacks)
    balance = getattr(getattr(recipe.model, "head", None), "balance", None)
    if balance is not None:
        optimizer = balanced(optimizer, balance)
    if task.hybrid is not None and task.hybrid.config.draws_older:
        optimizer = keep_routers(optimizer, task.hybrid.config.policy.refresh)
    schedule = make_schedule(rates, recipe.train.steps)
    shapes = jax.eval_shape(
        lambda p, f: start(
            p, optimizer, f, ema=recipe.train.ema is not None, scaling=_scaling(task, sites, whole)
        ),
        nn.meta.unbox(boxed),
        frozen,
    )
    shardings = state_shardings(shapes, boxed, mesh)
    frozen_parts = {n: place_frozen(n, tree, lambda: whole, mesh) for n, tree in shapes.frozen.items()}
    shardings = shardings.replace(frozen=frozen_parts)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return Setup(recipe, mesh, task, optimizer, schedule, whole, boxed, abstract, notes, sites, init)


def _check_full_rows(fp8: Fp8Config, packed: bool) -> None:
    """Raise ValueError if attention is to run in FP8 and rows may hold padding or several documents."""
    if fp8.attention and packed:
        raise ValueError(
            "train.fp8.attention=True takes rows of one document from end to end: set data.packing='windows' and "
            "data.partial='drop', or use False"
        )


def _scaling(task: Task, sites: frozenset[tuple[str, ...]], whole: Any) -> dict[str, Any] | None:
    """Return what low precision remembers before step 0, or None."""
    parts: dict[str, Any] = {}
    if task.fp8 is not None and task.fp8.scaling == "delayed":
        parts[AMAX] = first_amax(task.fp8, sites, whole)
    if task.loss_scale is not None:
        parts[LOSS] = first_loss_scale(task.loss_scale)
    return parts or None


def init_scaling(setup: Setup) -> dict[str, Any] | None:
    """Return what low precision remembers before step 0 where it is to live, or None."""
    made = jax.jit(
        lambda: _scaling(setup.task, setup.sites, setup.whole), out_shardings=setup.shardings.scaling
    )
    return made()


def place_frozen(name: str, tree: Any, boxed: Callable[[], Any], mesh: Mesh) -> Any:
    """Return shardings of a frozen tree: whole on every device if it is one of `REPLICATED`, else by the logical rules.

    By the rules an array lies as the model's parameter of the same path and shape, and is replicated if there is none.

    Args:
      name: of the tree.
      tree: its arrays or their shapes.
      boxed: gives the shapes of the model's parameters with their logical axis names.
      mesh: of all devices.
    """
    if name in REPLICATED:
        return jax.tree.map(lambda _: replicated(mesh), tree)
    return state_shardings(tree, boxed(), mesh)


def recipe_step(setup: Setup) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Make the jitted train step of the recipe, as `make_train_step` does."""
    train = setup.recipe.train
    return make_train_step(
        setup.task,
        setup.optimizer,
        schedule=setup.schedule,
        accumulate=train.accumulate,
        seed=train.seed,
        max_skips=train.max_skips,
        ema=train.ema,
        layer_norms=train.layer_norms,
        shardings=setup.shardings,
    )


def init_params(task: Task, data: RowsConfig, seed: int | Array) -> Any:
    """Draw boxed fp32 parameters from the seed, which may be traced; the same on any mesh."""
    return task.model.init(make_key(seed), **blank_inputs(task, data))["params"]


def boxed_params(task: Task, recipe: Recipe) -> Any:
    """Return shapes of the model's parameters, boxed with their logical axis names."""
    return jax.eval_shape(lambda: init_params(task, recipe.data, recipe.train.seed))


def _traced_init(task: Task, recipe: Recipe) -> tuple[core.ClosedJaxpr, Any]:
    """Return the program that draws parameters, with `boxed_params`."""
    return jax.make_jaxpr(lambda: init_params(task, recipe.data, recipe.train.seed), return_shape=True)()


def blank_inputs(task: Task, data: RowsConfig) -> dict[str, Array]:
    """Return what the model takes, of the shapes of a batch: ids, and entropies if there is a patcher."""
    ids = jnp.zeros((data.batch_size, data.seq_len), jnp.int32)
    if task.patcher is None:
        return {"ids": ids}
    return {"ids": ids, "entropies": jnp.zeros(ids.shape, jnp.float32)}


def init_state(setup: Setup, frozen: Mapping[str, Frozen] | None = None) -> TrainState:
    """Make the state before step 0 where it is to live."""
    recipe, init = setup.recipe, setup.init
    assert init is not None

    def begin(params: Any, frozen: Mapping[str, Frozen] | None) -> TrainState:
        ema = recipe.train.ema is not None
        scaling = _scaling(setup.task, setup.sites, setup.whole)
        return start(
            at_start(recipe, params, frozen or {}), setup.optimizer, frozen, ema=ema, scaling=scaling
        )

    places, tree = jax.tree.flatten(setup.shardings.params)
    leaves = jax.tree.structure(nn.meta.unbox(setup.whole))
    trained = jax.tree.leaves(trained_part(recipe, leaves.unflatten(range(leaves.num_leaves))))
    run = draw_at_once if len(places) < MANY else draw_traced
    drawn = tree.unflatten(run(only(init, trained), places))
    return jax.jit(begin, out_shardings=setup.shardings, donate_argnums=0)(drawn, frozen)


def open_data(
    recipe: Recipe, mesh: Mesh, *, split: Any = "train", mode: Any = "train", source: Any = None
) -> Dataset:
    """Open the rows of a split that this process's devices hold.

    Raises:
      ValueError: the batch does not divide into micro-batches, or those among the mesh's devices; packed documents
        cannot start where the patcher's blocks do; or a row does not divide among the devices along `seq`.
    """
    check_alignment(recipe.data, recipe.patcher)
    rows, parts = recipe.data.batch_size, recipe.train.accumulate if mode == "train" else 1
    _check_rows(rows, parts, mesh)
    start, stop = local_rows(batch_sharding(mesh), rows)
    share = stop - start
    data = make_dataset(recipe.data, split=split, mode=mode, source=source)
    for fewer in data.batch_sizes:
        _check_rows(fewer, parts, mesh)
    for length in data.row_lengths:
        layout_of(recipe.model).check(length, mesh.shape[SEQ_AXIS])
    told = {"history": entropy_history(recipe), "names_documents": bool(retrievals(recipe.model))}
    return replace(data, process_index=start // share, process_count=rows // share, **told)


def _check_rows(rows: int, parts: int, mesh: Mesh) -> None:
    """Raise ValueError unless a batch divides into micro-batches, and those among the mesh's devices."""
    if rows % parts:
        raise ValueError(f"batch_size = {rows} does not divide into train.accumulate = {parts} micro-batches")
    local_rows(batch_sharding(mesh), rows // parts)


def entropy_history(recipe: Recipe) -> History | None:
    """Return what the entropy model has to know of a document before a row that begins inside it.

    With it, entropies of windows are those of the whole document, wherever the windows begin. None for a recipe whose
    rows are no windows, whose batches bring entropies, or whose entropy model is still open.
    """
    patcher, model, data = recipe.patcher, recipe.entropy_model, recipe.data
    if patcher is None or not patcher.needs_entropies or model is None or data.entropies is not None:
        return None
    if data.packing != "windows" or not recipe.objective.causal:
        return None
    if patcher.entropy_context is not None:
        return History(patcher.entropy_context, patcher.entropy_context // 2)
    reach = getattr(model, "receptive_field", None)
    return None if reach is None else History(-(-(reach + 1) // HISTORY_MULTIPLE) * HISTORY_MULTIPLE)


def to_devices(batch: Batch, mesh: Mesh, batch_size: int, layout: SequenceLayout = CONTIGUOUS) -> Batch:
    """Make this process's rows its part of global arrays, with the bytes of each laid out for the mesh.

    `batch_size` counts the rows of a full batch; one of fewer rows has as many fewer in every process.
    """
    if layout != CONTIGUOUS and mesh.shape[SEQ_AXIS] > 1:
        order = layout.order(batch.inputs.shape[1], mesh.shape[SEQ_AXIS])
        batch = jax.tree.map(lambda x: x[:, order], batch)
    sharding = batch_sharding(mesh)
    start, stop = local_rows(sharding, batch_size)
    rows = batch_size * batch.inputs.shape[0] // (stop - start)
    return make_global(batch, sharding, batch_size=rows)
