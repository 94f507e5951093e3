"""Magnitude pruning: an exact share of a run's weights becomes 0, and what that costs.

Zeros are stored and multiplied as other numbers are, so a pruned run is no faster. The curve tells how many weights a
model needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxblt.precision.weights import refuse_quantized

KERNEL = "kernel"
"""The last name of a weight's path; embeddings, norms, biases and filters are not pruned."""


def prune(params: Any, share: float, *, over: Literal["model", "matrix"] = "model") -> Any:
    """Return parameters in which round(share · n) of the n weights are 0, those of least magnitude.

    Of weights of equal magnitude those that come first become 0. Weights that are 0 already count.

    Args:
      params: of a model, as `run.params`.
      share: of the weights, from 0 up to 1.
      over: rank the weights of all matrices together ("model"), or of each by itself ("matrix"). A scanned stack's
        layers are one matrix.

    Raises:
      ValueError: the share is out of range, or there is no weight.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share of weights to prune must be from 0 to 1, got {share}")
    refuse_quantized(params, "pruning")
    flat: dict[Any, Any] = dict(flatten_dict(params))
    names = list(weights_of(params))
    if not names:
        raise ValueError("there is no weight to prune: no parameter of two or more axes is called 'kernel'")
    groups = [names] if over == "model" else [[name] for name in names]
    pruned = flat.copy()
    for group in groups:
        sizes = [flat[name].size for name in group]
        values = np.concatenate([np.asarray(flat[name]).ravel() for name in group])
        values[np.argsort(np.abs(values), kind="stable")[: round(share * len(values))]] = 0
        for name, own in zip(group, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
            pruned[name] = jax.device_put(
                jnp.asarray(own.reshape(flat[name].shape), flat[name].dtype), flat[name].sharding
            )
    return unflatten_dict(pruned)


def weights_of(params: Any) -> dict[Any, Any]:
    """Return the weights of a model by path: what `prune` ranks."""
    flat: dict[Any, Any] = dict(flatten_dict(params))
    return {name: x for name, x in flat.items() if name[-1] == KERNEL and x.ndim > 1}


def sparsity(params: Any) -> float:
    """Return the share of weights that are 0."""
    leaves = weights_of(params).values()
    return float(sum(np.sum(np.asarray(x) == 0) for x in leaves) / sum(x.size for x in leaves))


def pruning_curve(
    run: Any, shares: Sequence[float], *, over: Literal["model", "matrix"] = "model", **options: Any
) -> list[dict[str, float]]:
    """Return the figures of a run on a split by share of pruned weights, each with its exact "sparsity".

    Args:
      run: a `jaxblt.run.Run`.
      shares: see `prune`.
      over: see `prune`.
      **options: of `run.evaluate`, such as `split`.
    """
    rows = []
    for share in shares:
        params = prune(run.params, share, over=over)
        rows.append(
            {
                "share": share,
                "sparsity": sparsity(params),
                **replace(run, params=params).evaluate(**options),
            }
        )
    return rows
