"""What rounding does to merged weights: sums in fp32 keep small updates, sums in bfloat16 may lose them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.update.site import is_adapted

ROUNDED = jnp.bfloat16


def merge_drift(params: Any, merged: Any) -> dict[str, float]:
    """Return how far off each update is where a merged kernel is rounded to bfloat16, as a share of its norm.

    |round(W + dW) - round(W) - dW| / |dW| in the Frobenius norm, of all layers of a scan at once: 1 where rounding
    takes the whole update away, 0 where there is none.

    Args:
      params: of the model with adapters.
      merged: of the model without, as `fuse` makes them.

    Returns:
      By the paths of the products.
    """
    found = _pairs(params, merged, "")
    return {path: float(_drift(*kernels)) for path, kernels in found.items()}


def describe_drift(drift: Mapping[str, float]) -> str:
    """Return one line of `merge_drift` for who merges: the mean over products, and the worst of them."""
    mean, worst = sum(drift.values()) / len(drift), max(drift, key=lambda path: drift[path])
    return (
        f"updates of {len(drift)} products, merged and rounded to bfloat16: {mean:.2%} off in the mean, "
        f"{drift[worst]:.2%} at {worst}"
    )


def _pairs(tree: Any, merged: Any, above: str) -> dict[str, tuple[Array, Array]]:
    """Return kernels of sites before and after."""
    if not isinstance(tree, Mapping):
        return {}
    if is_adapted(tree):
        return {above: (tree["kernel"], merged["kernel"])}
    found = {}
    for name, below in tree.items():
        if name in merged:
            found |= _pairs(below, merged[name], f"{above}/{name}" if above else name)
    return found


@jax.jit
def _drift(kernel: Float[Array, "..."], merged: Float[Array, "..."]) -> Float[Array, ""]:
    kernel = kernel.astype(jnp.float32)
    update = merged - kernel
    rounded, base = (x.astype(ROUNDED).astype(jnp.float32) for x in (merged, kernel))
    size = jnp.linalg.norm(update.reshape(-1))
    return jnp.linalg.norm((rounded - base - update).reshape(-1)) / jnp.where(size > 0, size, 1.0)
