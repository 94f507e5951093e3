"""Losses of banks whose experts have known labels: of the right expert's share, and of the hardest wrong one's."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.adapters.code.router import SHARES
from jaxblt.data.batch import Batch

TINY = float(jnp.finfo(jnp.float32).tiny)


class Labelled(NamedTuple):
    """Shares of one router's bank at bytes with a label.

    Attributes:
      shares: of the experts.
      labels: the right expert; of no account where the weight is 0.
      weights: 1 for scored bytes with a label.
    """

    shares: Float[Array, "B T E"]
    labels: Int[Array, "B T"]
    weights: Float[Array, "B T"]


def label_nats(side: Any, batch: Batch) -> Float[Array, ""]:
    """Sum -log p[label] over the scored bytes with a label and over routers of banks, which sowed their shares p."""
    nats = jnp.float32(0)
    for one in _labelled(side, batch):
        nats = nats - jnp.sum(one.weights * _logs(_right(one)))
    return nats


def negative_nats(side: Any, batch: Batch, margin: float) -> Float[Array, ""]:
    """Sum max(0, margin - log p[label] + log p[hardest]) likewise; the hardest is the wrong expert of the largest p.

    Other wrong experts have no gradient, and none has one where the margin is met.
    """
    nats = jnp.float32(0)
    for one in _labelled(side, batch):
        experts = jnp.arange(one.shares.shape[-1], dtype=jnp.int32)
        wrong = jnp.where(experts[None, None] == one.labels[..., None], 0.0, one.shares)
        short = jnp.float32(margin) - _logs(_right(one)) + _logs(jnp.max(wrong, -1))
        nats = nats + jnp.sum(one.weights * jnp.maximum(short, 0))
    return nats


def _logs(shares: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.log(jnp.maximum(shares, TINY))


def _right(one: Labelled) -> Float[Array, "B T"]:
    return jnp.take_along_axis(one.shares, one.labels[..., None], -1)[..., 0]


def _labelled(side: Any, batch: Batch) -> Iterator[Labelled]:
    """Yield the shares of each router, with the labels of the batch."""
    labels = batch.labels
    if not isinstance(labels, jax.Array) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            "HybridNextByte.labels imitates Batch.labels by banks, and the batch has no classes of one task: use data "
            "with such labels"
        )
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(side)
        if any(getattr(entry, "key", None) == SHARES for entry in path)
    ]
    labels = jnp.broadcast_to(labels if labels.ndim == 2 else labels[:, None], batch.inputs.shape)
    weights = jnp.where(labels >= 0, batch.loss_mask.astype(jnp.float32), 0.0)
    for leaf in found:
        # Axes in front are layers of a scan, whose blocks have a router each
        for shares in leaf.reshape(-1, *leaf.shape[-3:]):
            yield Labelled(shares, jnp.maximum(labels, 0), weights)
