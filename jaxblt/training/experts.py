"""Experts of a recipe's bank that start as given LoRAs: runs over the same base, or PEFT files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxblt.adapters import AdapterConfig, detach, load_peft, warm_start
from jaxblt.adapters.attach import stacks_of
from jaxblt.adapters.peft import CONFIG, FILES_MOST
from jaxblt.training.recipe import Recipe
from jaxblt.training.resolved import read_resolved
from jaxblt.training.state import BASE, Frozen, gathered
from jaxblt.training.taken import stored_params


def with_experts(recipe: Recipe, params: Any, frozen: dict[str, Frozen], mesh: Mesh) -> Any:
    """The trained part before step 0, with the LoRAs that `recipe.experts` names in the blocks of its banks.

    Args:
      recipe: of the run.
      params: as they were drawn.
      frozen: the base among the frozen trees.
      mesh: of all devices.

    Raises:
      FileNotFoundError: a folder holds neither a run nor PEFT files.
      ValueError: a LoRA was trained over another base, or with more than itself; or as of `jaxblt.adapters.warm_start`.
    """
    if not recipe.experts:
        return params
    loras = [_read(folder, recipe, frozen[BASE].content_hash, mesh) for folder in recipe.experts]
    here = jax.tree.map(lambda leaf: jnp.asarray(gathered(leaf)), params)
    started = warm_start(recipe.model, here, loras)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), started, params)


def _read(folder: str, recipe: Recipe, base_hash: str, mesh: Mesh) -> tuple[Any, Any]:
    """(config, params) of a static adapter."""
    if (Path(folder) / CONFIG).is_file():
        config = _static_config(Path(folder), recipe.model)
        return config, load_peft(folder, config, base_hash=base_hash)
    resolved = read_resolved(folder)
    if resolved.frozen.get(BASE) != base_hash:
        raise ValueError(
            f"experts: {folder!r} was trained over another base than base_run={recipe.base_run!r} (content hashes "
            f"{resolved.frozen.get(BASE)} and {base_hash}): use LoRAs of this base, in the same train.dtype"
        )
    if resolved.recipe.also_train:
        raise ValueError(
            f"experts: {folder!r} has also_train = {resolved.recipe.also_train}, which its LoRA was trained with and "
            "an expert cannot take over: train LoRAs with also_train=()"
        )
    params = stored_params(folder, {}, (), mesh)
    return resolved.recipe.model, jax.tree.map(lambda leaf: jnp.asarray(gathered(leaf)), params)


def _static_config(folder: Path, model: Any) -> Any:
    """The model with static adapters of the rank and alpha that PEFT files name, at the sites of its banks."""
    with open(folder / CONFIG, "rb") as file:
        said = json.loads(file.read(FILES_MOST))
    rank, alpha = (said.get(name) if isinstance(said, dict) else None for name in ("r", "lora_alpha"))
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise ValueError(
            f"{folder / CONFIG} must name r and lora_alpha, got {rank!r} and {alpha!r}: use LoRA files"
        )
    stacks = {}
    for name, stack in stacks_of(model).items():
        if stack.adapter is not None:
            sites = tuple(pattern for pattern, _ in stack.adapter.patterns)
            static = AdapterConfig(sites=sites, rank=rank, alpha=alpha)
            stacks[name] = replace(stack, adapter=static)
    return replace(detach(model), **stacks)
