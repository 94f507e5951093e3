"""Ranges of activations for scales that are chosen once, from what products read on real text.

The largest entry of a heavy tail would leave most entries few values. The other choosers clip it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from jaxblt.layers import Linear
from jaxblt.precision.weights.kernel import TOP

Chooser = Literal["minmax", "percentile", "mse", "entropy"]
"""How a range is chosen."""
CHOOSERS: tuple[Chooser, ...] = get_args(Chooser)

COLLECTION, NAME = "intermediates", "inputs"
SAMPLES = 4096
"""Entries of a call's activations that are kept for each product, besides the largest."""
PERCENTILE = 99.9
CANDIDATES = 100
"""Ranges that "mse" and "entropy" compare, evenly spaced up to the largest entry."""
BINS = 2048
"""Of the histogram that "entropy" compares distributions by."""


def record_inputs() -> AbstractContextManager[None]:
    """Make a context in which products sow a sample of |x| into the collection "intermediates"."""

    def intercept(call: Any, args: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, Linear) and context.method_name == "products":
            x, layers, _ = args
            for layer in layers:
                layer.sow(COLLECTION, NAME, _sample(x))
        return call(*args, **options)

    return nn.intercept_methods(intercept)


def _sample(x: Float[Array, "..."]) -> Float[Array, "S"]:
    """Return |x| of entries that are evenly spaced, and the largest."""
    flat = jnp.abs(x).astype(jnp.float32).reshape(-1)
    stride = max(1, len(flat) // SAMPLES)
    # Take an odd stride: an even one would see the same channels of each token
    stride += 1 - stride % 2
    return jnp.append(flat[::stride][:SAMPLES], jnp.max(flat))


def input_scales(sown: Mapping[str, Any], chooser: Chooser) -> dict[tuple[str, ...], Float[Array, "*#L"]]:
    """Return the scale of each product's activations by its path, of every layer of a scanned one.

    Args:
      sown: the collection that a call inside `record_inputs` returns; several calls' joined on the last axis.
      chooser: see `choose_range`.
    """
    found = {}
    for path, (samples,) in _entries(sown).items():
        rows = np.asarray(samples).reshape(-1, samples.shape[-1])
        ranges = np.array([choose_range(row, chooser) for row in rows], np.float32).reshape(
            samples.shape[:-1]
        )
        found[path] = jnp.asarray(np.where(ranges > 0, ranges / np.float32(TOP["w8a8"]), np.float32(1)))
    return found


def _entries(sown: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return {path[:-1]: value for path, value in flatten_dict(sown).items() if path[-1] == NAME}


def join_inputs(calls: list[Any]) -> Any:
    """Join what several calls inside `record_inputs` sowed."""
    return jax.tree.map(lambda *samples: np.concatenate(samples, -1), *jax.device_get(calls))


def choose_range(values: Float[np.ndarray, "N"], chooser: Chooser) -> float:
    """Return the largest |x| that 8-bit values are to reach; what exceeds it is clipped.

    "minmax" takes the largest entry, "percentile" the 99.9th percentile, "mse" the range of least mean square error,
    "entropy" that of the least Kullback-Leibler divergence between the entries and those that are clipped and rounded
    (Migacz, 8-bit inference with TensorRT, 2017).

    Args:
      values: |x|, a sample that holds the largest entry.
      chooser: how.
    """
    values = np.abs(np.asarray(values, np.float64))
    most = float(values.max())
    if most == 0 or not np.isfinite(most) or chooser == "minmax":
        return most
    if chooser == "percentile":
        return float(np.percentile(values, PERCENTILE)) or most
    cost: Callable[[np.ndarray, float], float] = {"mse": _square_error, "entropy": _divergence}[chooser]
    if chooser == "entropy":
        values = np.histogram(values, BINS, (0, most))[0].astype(np.float64)
        candidates = [
            most * count / BINS for count in np.linspace(TOP["w8a8"] + 1, BINS, CANDIDATES).astype(int)
        ]
        return min(candidates, key=lambda range_: cost(values, range_ / most))
    candidates = [most * i / CANDIDATES for i in range(1, CANDIDATES + 1)]
    return min(candidates, key=lambda range_: cost(values, range_))


def _square_error(values: np.ndarray, range_: float) -> float:
    """Return the mean square of what rounding in a range changes."""
    scale = range_ / TOP["w8a8"]
    return float(np.mean((np.minimum(np.round(values / scale), TOP["w8a8"]) * scale - values) ** 2))


def _divergence(counts: np.ndarray, share: float) -> float:
    """Return KL(p, q): p is a histogram clipped to this share of its bins, q the same rounded to as many levels as
    8 bits have."""
    size = round(share * len(counts))
    p, levels = counts[:size].copy(), int(TOP["w8a8"]) + 1
    own = np.floor(np.arange(size) * levels / size).astype(int)
    filled = p > 0
    sums = np.bincount(own, p, levels)
    held = np.bincount(own, filled, levels)
    q = np.where(filled, (sums / np.maximum(held, 1))[own], 0)
    p[-1] += counts[size:].sum()
    filled = (p > 0) & (q > 0)
    # Keep what only p has at a price: its logarithm would be infinite
    lost = p[(p > 0) & (q == 0)].sum() / p.sum()
    p, q = p / p.sum(), q / max(q.sum(), 1)
    return float(
        np.sum(p[filled] * np.log(p[filled] / q[filled])) + lost * np.log(1 / np.finfo(np.float32).eps)
    )
