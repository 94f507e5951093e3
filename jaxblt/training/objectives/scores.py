"""How answers are scored: sums over a batch, which add up over micro-batches, hosts and splits, and figures of them."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.data.batch import Batch
from jaxblt.training.metrics import answered, cross_entropy, smoothed


class Scores:
    """The scores that all objectives share."""

    def answered(self, logits: Any, batch: Batch) -> Float[Array, "B"] | float:
        """Return the share of prices that modules sowed which each row pays: all of it."""
        return 1.0


class IdScores(Scores):
    """Scores of an objective that asks for ids, weighted by `batch.loss_mask`: loss, bits per byte, accuracy.

    loss = Σ w ℓ / Σ w with ℓ = (1 - ε) · (-log p[target]) + ε · mean over ids of -log p, in nats; bits per byte are of
    -log p[target] alone.
    """

    label_smoothing: float = 0.0
    accuracy: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Of the headline figure."""
        return self.accuracy

    @property
    def headline(self) -> str:
        """The figure to show first."""
        return "accuracy" if self.accuracy else "bits_per_byte"

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Figures that evaluations may be compared by."""
        return ("loss", "bits_per_byte", *(("accuracy", "row_accuracy") if self.accuracy else ()))

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Return Σ w; 0 if nothing is scored, so that the loss is NaN and a step changes nothing."""
        return jnp.sum(batch.loss_mask.astype(jnp.float32))

    def answered(self, logits: Float[Array, "B T V"], batch: Batch) -> Float[Array, "B"]:
        """Return how well each row is answered, from 0 to 1: that share of prices is paid."""
        return answered(logits, batch.targets, batch.loss_mask.astype(jnp.float32))

    def sums(self, logits: Float[Array, "B T V"], batch: Batch) -> dict[str, Float[Array, ""]]:
        """Return Σ w ℓ as "loss", Σ w · -log p as "nll", Σ w as "weight"; with accuracy Σ w over right ids, and rows.

        A row counts as right if all of its scored ids are; rows without any do not count.
        """
        weights = batch.loss_mask.astype(jnp.float32)
        nats = cross_entropy(logits, batch.targets)
        nll = jnp.sum(nats * weights)
        found = {"loss": nll, "nll": nll, "weight": jnp.sum(weights)}
        if self.label_smoothing:
            found["loss"] = jnp.sum(smoothed(nats, logits, self.label_smoothing) * weights)
        return found | (_count_right(logits, batch) if self.accuracy else {})

    def figures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return loss in nats and bits_per_byte; accuracy of ids and of whole rows where they were counted."""
        weight = sums["weight"]
        found = {"loss": sums["loss"] / weight, "bits_per_byte": sums["nll"] / weight / math.log(2)}
        if self.accuracy:
            found |= {"accuracy": sums["right"] / weight, "row_accuracy": sums["right_rows"] / sums["rows"]}
        return found


def _count_right(logits: Float[Array, "B T V"], batch: Batch) -> dict[str, Float[Array, ""]]:
    weights = batch.loss_mask.astype(jnp.float32)
    right, scored = jnp.argmax(logits, -1) == batch.targets, weights > 0
    rows = jnp.any(scored, 1)
    return {
        "right": jnp.sum(weights * right.astype(jnp.float32)),
        "right_rows": jnp.sum(rows & jnp.all(right | ~scored, 1), dtype=jnp.float32),
        "rows": jnp.sum(rows, dtype=jnp.float32),
    }
