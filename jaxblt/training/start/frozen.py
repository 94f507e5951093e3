"""The frozen trees of a run: an entropy model taken from the run that trained it, the patcher calibrated for it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.parallel.mesh import off_mesh
from jaxblt.parallel.rules import replicated
from jaxblt.patching import (
    PatcherConfig,
    calibrate_capacity,
    calibrate_threshold,
    closes,
    threshold_margin,
)
from jaxblt.patching.patches import count_wanted
from jaxblt.precision.weights import from_stored, shapes_as_stored
from jaxblt.random_keys import make_key
from jaxblt.training.packing import capacity_multiple, fill_rows, mean_slots
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.base import load_base
from jaxblt.training.start.calibrations import calibration_key, read_calibration, write_calibration
from jaxblt.training.start.setup import boxed_params, entropy_history, make_task, place_frozen
from jaxblt.training.start.startup import cache_folder
from jaxblt.training.state import ENTROPY, Frozen, Weights, freeze_entropy
from jaxblt.training.step import compiler_options, find_entropies
from jaxblt.training.stored.checkpoint import restore
from jaxblt.training.stored.fitting import fitting_shapes
from jaxblt.training.stored.frozen_store import read_frozen
from jaxblt.training.stored.remote_run import readable
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir, has_rule_of, read_resolved

SUBTREE: dict[Weights, str] = {"raw": "params", "ema": "ema"}
"""Where a checkpoint holds them."""
SAMPLE_BYTES = 1 << 18
"""Bytes of training data that a threshold and a capacity are calibrated on."""


def load_params(run_dir: str, shapes: Any, *, step: int | None = None, weights: Weights = "raw") -> Any:
    """Load parameters of a run's newest checkpoint (or that of `step`), in the dtypes and shardings of `shapes`.

    `weights` chooses between them and their average.

    Raises:
      FileNotFoundError: there is no such run or checkpoint.
      ValueError: the run's parameters have other names or shapes.
    """
    with readable(run_dir, "newest" if step is None else step) as folder:
        return restore(checkpoint_dir(folder), shapes, step=step, subtree=SUBTREE[weights]).state


def load_frozen(
    run_dir: str | os.PathLike[str], resolved: Resolved, mesh: Mesh | None = None, *, step: int | None = None
) -> dict[str, Frozen]:
    """Load a run's frozen trees by name, each known by its content hash; every process calls it.

    Args:
      run_dir: of the run.
      resolved: its recipe and content hashes.
      mesh: of all devices, among which `place_frozen` divides the trees; None puts them on the default device.
      step: of the run's checkpoint; it matters where each of them holds the tree, as they once did.

    Raises:
      FileNotFoundError: a tree is missing.
      StateMismatch: a folder holds another tree than the config names, or an entropy model of another config.
      CheckpointCorrupt: a tree is damaged.
      ValueError: the entropy model's config describes no model that can be built.
    """
    found = {
        name: read_frozen(
            run_dir, name, content_hash, partial(_asked, resolved.recipe, name, mesh), step=step
        )
        for name, content_hash in resolved.frozen.items()
    }
    return {name: replace(tree, params=from_stored(tree.params)) for name, tree in found.items()}


def _asked(recipe: Recipe, name: str, mesh: Mesh | None, stored: Any) -> Any:
    """Choose what to read of a stored tree: all of it, as stored; an entropy model only if it fits its config."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stored)
    if name == ENTROPY:
        config = recipe.entropy_model
        held = from_stored(stored)
        found = fitting_shapes(lambda: _boxed(config), lambda params: _pass(config, params), held)
        dtype = entropy_dtype(jax.tree.leaves(stored))
        found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), found)
        shapes = shapes_as_stored(found, held)
    if mesh is None:
        return shapes
    shardings = place_frozen(name, shapes, partial(boxed_params, make_task(recipe), recipe), mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def entropy_dtype(stored: Sequence[Any]) -> Any:
    """Return the dtype of an entropy model's arrays: bfloat16, or float32 if all are stored so."""
    return jnp.float32 if all(x.dtype == jnp.float32 for x in stored) else jnp.bfloat16


def _row() -> jax.Array:
    return jnp.zeros((1, 16), jnp.int32)


def _boxed(config: Any) -> Any:
    with off_mesh():  # one short row divides among no devices
        return config.build().init(make_key(0), _row())["params"]


def _pass(config: Any, params: Any) -> Any:
    with off_mesh():
        return config.build().apply({"params": params}, _row())


def param_shapes(config: Any, sharding: Any = None) -> Any:
    """Return shapes of a byte model's fp32 parameters, without logical axis names."""
    found = nn.meta.unbox(jax.eval_shape(lambda: _boxed(config)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), found)


def inherited_entropy(recipe: Recipe, mesh: Mesh) -> tuple[Recipe, dict[str, Frozen]]:
    """Load the entropy model of the run `recipe.init_from`, if both cut by one rule; return the recipe with its config.

    It is the one that the parameters know, though its own run may be gone or trained on.

    Raises:
      FileNotFoundError: there is no such run.
    """
    if recipe.init_from is None:
        return recipe, {}
    resolved = read_resolved(recipe.init_from)
    if ENTROPY not in resolved.frozen or not has_rule_of(recipe, resolved.recipe):
        return recipe, {}
    only = Resolved(resolved.recipe, {ENTROPY: resolved.frozen[ENTROPY]})
    found = replace(recipe, entropy_model=resolved.recipe.entropy_model)
    with readable(recipe.init_from, "newest") as folder:
        return found, load_frozen(folder, only, mesh)


def resolve(
    recipe: Recipe, data: Dataset, mesh: Mesh, inherited: Mapping[str, Frozen] | None = None
) -> tuple[Recipe, dict[str, Frozen]]:
    """Fill in entropy model, threshold and capacity; return the recipe and its frozen trees by name.

    A missing threshold is calibrated so that the mean patch has `recipe.bytes_per_patch` bytes, a missing capacity so
    that 99.9 % of blocks do not overflow, both on a sample of the training data. Learned boundaries move, and get
    slots for that mean and a quarter more. An `inherited` entropy model takes the
    place of that of `entropy_run`.

    Raises:
      FileNotFoundError: `entropy_run` or `base_run` holds no run.
      ValueError: the target is out of reach, `entropy_run` has a model with patches, or the data's precomputed
        entropies are another model's; or as of `load_base`.
    """
    patcher = recipe.patcher
    frozen = load_base(recipe, lambda: boxed_params(make_task(recipe), recipe), mesh)
    if patcher is None:
        return recipe, frozen
    model = recipe.entropy_model
    frozen |= inherited or {}
    if inherited and data.entropies is not None:
        data.entropies.check(frozen[ENTROPY].content_hash, patcher.entropy_context)
    if recipe.entropy_run is not None and not inherited:
        trained = read_resolved(recipe.entropy_run).recipe
        if trained.patcher is not None:
            raise ValueError(
                f"entropy_run = {recipe.entropy_run!r} is a run of {trained.name!r}, whose model has patches itself: "
                "name the run of a byte model, as the recipe demo_entropy trains"
            )
        model = trained.model
        shapes = param_shapes(model, replicated(mesh))
        params = load_params(recipe.entropy_run, shapes, weights=trained.train.weights)
        frozen |= freeze_entropy(params)
        if patcher.entropy_context is None:
            patcher = replace(patcher, entropy_context=bounded_context(model, trained.data.seq_len))
        if data.entropies is not None:
            data.entropies.check(frozen[ENTROPY].content_hash, patcher.entropy_context)
    recipe = replace(recipe, patcher=patcher, entropy_model=model)
    if patcher.mode == "learned" and patcher.capacity is None:
        recipe = replace(recipe, patcher=with_mean_slots(recipe))
    elif patcher.capacity is None or (patcher.has_threshold and patcher.threshold is None):
        patcher = calibrate(recipe, data, mesh, frozen)
        recipe = replace(recipe, patcher=patcher)
    return recipe, frozen


def with_mean_slots(recipe: Recipe) -> PatcherConfig:
    """Return the patcher of learned boundaries with slots for the recipe's mean length and a quarter more."""
    assert recipe.patcher is not None
    assert recipe.bytes_per_patch is not None  # the recipe saw to it
    slots = mean_slots(recipe.model, recipe.data, recipe.patcher, recipe.bytes_per_patch)
    return replace(recipe.patcher, capacity=slots)


def bounded_context(model: Any, trained_length: int) -> int | None:
    """Return the bytes that an entropy model may see at the most: those of the rows that it was trained on.

    None where half of them hold all that a prediction depends on, as for stacks of sliding windows: every context is
    the same to such a model.
    """
    context = trained_length // 2 * 2
    reach = getattr(model, "receptive_field", None)
    return None if context < 2 or (reach is not None and reach <= context // 2) else context


def calibrate(recipe: Recipe, data: Dataset, mesh: Mesh, frozen: Mapping[str, Frozen]) -> PatcherConfig:
    """Fill in the threshold and the capacity that the recipe's patcher leaves open, from a sample of the data.

    What a process found before is read from the recipe's cache, if it has one and is one process.

    Args:
      recipe: with its entropy model; its data are those of `data`.
      data: rows to sample.
      mesh: of all devices.
      frozen: holds the entropy model, unless the data bring entropies or none are read.

    Raises:
      ValueError: `recipe.bytes_per_patch` is out of reach, or the data hold no entropies and there is no model.
    """
    batches = sample_batches(data, recipe)
    folder = cache_folder(recipe.train.compilation_cache)
    if folder is None or jax.process_count() > 1:
        return _calibrate(recipe, batches, mesh, frozen)
    file = Path(folder) / "calibrations" / f"{calibration_key(recipe, batches, frozen)}.json"
    if (known := read_calibration(file, recipe.patcher)) is not None:
        return known
    found = _calibrate(recipe, batches, mesh, frozen)
    write_calibration(file, found)
    return found


def _calibrate(
    recipe: Recipe, batches: list[Batch], mesh: Mesh, frozen: Mapping[str, Frozen]
) -> PatcherConfig:
    patcher = recipe.patcher
    assert patcher is not None
    ids, segments, entropies = sample(batches, recipe, mesh, frozen)
    if patcher.has_threshold and patcher.threshold is None:
        assert recipe.bytes_per_patch is not None  # the recipe saw to it
        found = calibrate_threshold(entropies, recipe.bytes_per_patch, config=patcher, segment_ids=segments)
        patcher = replace(patcher, threshold=float(_from_first(np.float32(found))))
        margin = threshold_margin(entropies, config=patcher, segment_ids=segments)
        patcher = replace(patcher, margin=float(_from_first(np.float32(margin))))
    if patcher.capacity is None and patcher.mode in ("entropy", "greedy", "space"):
        rows = {"entropies": entropies, "segment_ids": segments}
        counts = jax.jit(partial(_wanted_patches, patcher), compiler_options=compiler_options())(ids, **rows)
        multiple = capacity_multiple(recipe.model, recipe.data, patcher)
        slots = calibrate_capacity(counts, block_size=patcher.block_size, multiple=multiple)
        slots = fill_rows(slots, recipe.data, patcher, multiple=multiple)
        patcher = replace(patcher, capacity=int(_from_first(np.int32(slots))))
    return patcher


def _wanted_patches(patcher: PatcherConfig, ids: Any, *, entropies: Any, segment_ids: Any) -> Any:
    """Count the patches of each block before slots are limited."""
    closed = closes(patcher, ids, entropies, segment_ids)
    return count_wanted(closed, segment_ids, block_size=patcher.block_size)


def sample_batches(data: Dataset, recipe: Recipe) -> list[Batch]:
    """Sample training batches, the same in every process.

    Of endless, shuffled data these are the first of full length; of one pass in order they lie at equal distances.
    """
    config, data = data.config, replace(data, history=entropy_history(recipe))
    rows = -(-SAMPLE_BYTES // config.seq_len)
    rows = rows if data.num_rows is None else min(rows, data.num_rows)
    steps: Any = range(data.settled, data.settled + -(-rows // config.batch_size))
    if data.num_batches is not None:
        steps = np.unique(np.linspace(0, data.num_batches - 1, len(steps)).astype(int)).tolist()
    return [data.batch(step, slots=range(data.rows_at(step))) for step in steps]


def sample(
    batches: list[Batch], recipe: Recipe, mesh: Mesh, frozen: Mapping[str, Frozen]
) -> tuple[Any, Any, Any]:
    """Return ids, segments and entropies [rows, T] of batches."""
    longest = max(batch.inputs.shape[1] for batch in batches)
    if ENTROPY in frozen and batches[0].entropies is None:
        task = replace(make_task(recipe), packed=True)
        # Take the step's options: this program compiles sooner, and rounds entropies as the step does
        options: Any = {"out_shardings": replicated(mesh), "compiler_options": compiler_options()}
        entropy = jax.jit(partial(find_entropies, task), **options)
        batches = [
            replace(b, entropies=np.asarray(entropy(frozen, jax.device_put(b, replicated(mesh)))))
            for b in batches
        ]

    def stack(name: str) -> Any:
        rows = [getattr(batch, name) for batch in batches]
        if any(x is None for x in rows):
            return None
        return jax.device_put(np.concatenate([np.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in rows]))

    return stack("inputs"), stack("segment_ids"), stack("entropies")


def _from_first(value: Any) -> Any:
    """Return process 0's value: hosts may round differently, and every one must cut alike."""
    return value if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(value)
