"""Experts of a recipe's bank that start as given LoRAs: runs over the same base, or PEFT files."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxblt.adapters import AdapterConfig, detach, load_peft, warm_start, without_index
from jaxblt.adapters.files.peft import CONFIG, read_config
from jaxblt.adapters.update.attach import stacks_of
from jaxblt.models.stack import stack_periods, unstack_periods
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.initial_params import stored_params
from jaxblt.training.state import BASE, Frozen, content_hash, gathered
from jaxblt.training.stored.resolved import read_resolved


def with_experts(recipe: Recipe, params: Any, frozen: dict[str, Frozen], mesh: Mesh) -> Any:
    """Put the LoRAs that `recipe.experts` names into the banks of the trained part before step 0.

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
    base = frozen[BASE]
    hashes = cache(lambda: base_hashes(recipe.model, base))
    loras = [_read(folder, recipe, base.content_hash, hashes, mesh) for folder in recipe.experts]
    here = jax.tree.map(lambda leaf: jnp.asarray(gathered(leaf)), params)
    started = warm_start(recipe.model, here, loras)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), started, params)


def base_hashes(model: Any, base: Frozen) -> list[str]:
    """Return content hashes of a base by which runs with its stacks scanned, and with them unrolled, know it.

    The index that a router searches lies with its base, and static adapters have none.
    """
    # On the host: stacked on a device, the base would be there twice
    bare = jax.tree.map(gathered, without_index(base.params))
    forms = [
        {**bare, **{name: form(bare[name]) for name in stacks_of(model) if name in bare}}
        for form in (lambda stack: stack_periods(stack, join=_stacked), unstack_periods)
    ]
    return [content_hash(form) for form in forms]


def _stacked(*layers: np.ndarray) -> np.ndarray:
    return np.stack(layers)


def _read(
    folder: str, recipe: Recipe, base_hash: str, hashes: Callable[[], list[str]], mesh: Mesh
) -> tuple[Any, Any]:
    """Read (config, params) of a static adapter, over the base of this hash or of one of those."""
    if (Path(folder) / CONFIG).is_file():
        config, said = _static_config(Path(folder), recipe.model)
        known = said if said in (None, base_hash) or said in hashes() else base_hash
        return config, load_peft(folder, config, base_hash=known)
    resolved = read_resolved(folder)
    said = resolved.frozen.get(BASE)
    if said != base_hash and said not in hashes():
        raise ValueError(
            f"experts: {folder!r} was trained over another base than base_run={recipe.base_run!r} (content hashes "
            f"{said} and {base_hash}): use LoRAs of this base, in the same train.dtype"
        )
    if resolved.recipe.also_train:
        raise ValueError(
            f"experts: {folder!r} has also_train = {resolved.recipe.also_train}, which its LoRA was trained with and "
            "an expert cannot take over: train LoRAs with also_train=()"
        )
    params = stored_params(folder, {}, (), mesh)
    return resolved.recipe.model, jax.tree.map(lambda leaf: jnp.asarray(gathered(leaf)), params)


def _static_config(folder: Path, model: Any) -> tuple[Any, str | None]:
    """Return the model with static adapters of PEFT files' rank and alpha, at the sites of its banks.

    And the hash of the base that the files name, if they do.
    """
    said = read_config(folder)
    rank, alpha = said.get("r"), said.get("lora_alpha")
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
    return replace(detach(model), **stacks), said.get("revision")
