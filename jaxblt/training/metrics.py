"""What a step measures: losses per byte, patches, norms of layers, and what modules report on the side."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.patching.patches import Patches
from jaxblt.side_outputs import Price, Sown

Metrics = dict[str, Float[Array, "..."]]
"""Scalars, and vectors that modules sowed."""
PERIODS = "periods"
"""Part of a path whose parameters are stacked by period of a scanned stack."""


def cross_entropy(logits: Float[Array, "*N V"], targets: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """Return -log softmax(logits)[target] in nats, in fp32."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


def smoothed(nats: Float[Array, "*N"], logits: Float[Array, "*N V"], share: float) -> Float[Array, "*N"]:
    """Return (1 - share) nats + share · mean over answers of -log softmax(logits): nats with a smooth label."""
    logits = logits.astype(jnp.float32)
    return (1 - share) * nats + share * (jax.nn.logsumexp(logits, -1) - jnp.mean(logits, -1))


def bits(nats: float) -> float:
    """Return nats as bits."""
    return nats / math.log(2)


def answered(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> Float[Array, "B"]:
    """Return exp of each row's mean log p[target], weighted: 1 for certain answers, 0 for none; without a gradient."""
    total = jnp.sum(weights, 1)
    nats = jnp.sum(cross_entropy(logits, targets) * weights, 1) / jnp.where(total > 0, total, 1)
    return jax.lax.stop_gradient(jnp.where(total > 0, jnp.exp(-nats), 0))


def sown_losses(side: Any, paid: Float[Array, "B"] | float = 1.0) -> Float[Array, ""]:
    """Return the sum of everything sown into "losses"; modules sow losses with their weight already applied.

    Args:
      side: the collections.
      paid: the share of a `Price` that each row pays; of these the mean over rows is added.
    """
    leaves = jax.tree.leaves(side.get("losses", {}), is_leaf=lambda node: isinstance(node, Price))
    losses = (
        jnp.mean(paid * jnp.sum(leaf.rows, range(leaf.rows.ndim - 1))) if isinstance(leaf, Price) else leaf
        for leaf in leaves
    )
    return sum((jnp.sum(loss.astype(jnp.float32)) for loss in losses), jnp.float32(0))


def sown_metrics(side: Any) -> Metrics:
    """Return the mean over layers and calls of each value sown into "metrics", by the path of its module.

    A value that did not go through `sow_metric` is a scalar.
    """
    found: dict[str, list[Any]] = {}
    sown = jax.tree_util.tree_leaves_with_path(
        side.get("metrics", {}), is_leaf=lambda node: isinstance(node, Sown)
    )
    for path, leaf in sown:
        name = "/".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))
        value = leaf if isinstance(leaf, Sown) else Sown(leaf.astype(jnp.float32), 0)
        found.setdefault(name, []).append(value.mean())
    return {name: jnp.mean(jnp.stack(values), 0) for name, values in found.items()}


def as_scalars(metrics: Metrics) -> dict[str, float]:
    """Fetch metrics; a vector becomes "name/0", "name/1", ..."""
    found: dict[str, float] = {}
    for name, value in jax.device_get(metrics).items():
        if value.ndim == 0:
            found[name] = float(value)
        else:
            found |= {f"{name}/{i}": float(x) for i, x in enumerate(value)}
    return found


def patch_counts(patches: Patches) -> Metrics:
    """Count patches, bytes they hold and boundaries refused, as sums to be added up over micro-batches."""
    return {
        "patches": jnp.sum(patches.lengths > 0, dtype=jnp.float32),
        "patched_bytes": jnp.sum(patches.lengths, dtype=jnp.float32),
        "refused": jnp.sum(patches.overflow, dtype=jnp.float32),
    }


def patch_metrics(counts: Metrics) -> Metrics:
    """Return patches, bytes_per_patch, and overflow: the share of wanted patches that were refused."""
    patches, refused = counts["patches"], counts["refused"]
    one = jnp.float32(1)
    return {
        "patches": patches,
        "bytes_per_patch": counts["patched_bytes"] / jnp.maximum(patches, one),
        "overflow": refused / jnp.maximum(patches + refused, one),
    }


def layer_norms(grads: Any) -> Metrics:
    """Return norms by layer as "grad_norm/PATH": of each block, and of each part of the model without blocks.

    Blocks of a scanned stack have one norm a period, in a vector. Squares of all of them sum to the square of the
    gradient's norm. A norm that is not finite names the layer whose gradient is not.
    """
    squares: Metrics = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        names = [str(getattr(entry, "key", entry)) for entry in path]
        first = 1 if PERIODS in names else 0
        square = jnp.sum(jnp.square(leaf.astype(jnp.float32)), range(first, leaf.ndim))
        layer = _layer_of(names)
        squares[layer] = squares.get(layer, jnp.zeros_like(square)) + square
    return {f"grad_norm/{layer}": jnp.sqrt(square) for layer, square in squares.items()}


def _layer_of(names: list[str]) -> str:
    """Return the path of the block that holds a parameter, or of the model's part."""
    ends = [i + 1 for i, name in enumerate(names) if name.startswith("block_")]
    return "/".join(names[: ends[0] if ends else 1])
