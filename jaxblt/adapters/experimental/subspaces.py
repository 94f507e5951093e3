"""Disjoint subspaces of a bank: tasks with experts of their own, so that one's training never moves another's."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.site import ADAPTER


def plan_subspaces(adapter: AdapterConfig, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the experts of each task: as many as its size, and none of another task's.

    Args:
      adapter: a bank.
      sizes: experts of each task.

    Raises:
      ValueError: the adapter is no bank, a size is below 1, or the bank has too few experts.
    """
    experts, wanted = adapter.blocks or 0, sum(sizes.values())
    if any(size < 1 for size in sizes.values()) or wanted > experts:
        raise ValueError(
            f"tasks ask for {dict(sizes)} experts, and the bank has {experts}: give each at least 1, {experts} in all"
        )
    ends = np.cumsum(list(sizes.values()))
    return {
        name: tuple(range(int(end) - size, int(end)))
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


def subspace_code(adapter: AdapterConfig, experts: Sequence[int]) -> Float[np.ndarray, "W"]:
    """Return the code with which these experts act evenly, at all levels; those of tasks may be added up."""
    numbers = np.isin(np.arange(adapter.numbers), experts) / np.float32(len(experts))
    return np.tile(numbers.astype(np.float32), len(adapter.level_names))


def mask_subspace(adapter: AdapterConfig, trained: Any, experts: Sequence[int]) -> Any:
    """Return 1 for the numbers of U and V that are these experts', and 0 for all else, like `trained`.

    Multiply an optimiser's updates by it: a gradient of 0 is not enough, as weight decay moves numbers without one.
    """

    def mask(path: tuple[Any, ...], x: Any) -> Any:
        names = [entry.key for entry in path]
        if len(names) < 2 or names[-2] != ADAPTER or names[-1] not in ("u", "v"):
            return jnp.zeros_like(x)
        # V ends with ranks, U begins with them, behind the layers of a scan
        axis = x.ndim - 1 if names[-1] == "v" else int("periods" in names)
        acts = jnp.isin(jnp.arange(adapter.numbers), jnp.asarray(experts))
        ranks = jnp.repeat(acts, x.shape[axis] // adapter.numbers)
        shape = [1] * x.ndim
        shape[axis] = -1
        return jnp.broadcast_to(ranks.astype(x.dtype).reshape(shape), x.shape)

    return jax.tree_util.tree_map_with_path(mask, trained)
