"""A second, frozen model whose predictions a run stays close to: the base, an expert, or a routed model to distil."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.data.batch import Batch
from jaxblt.training.objectives.objectives import NextByte
from jaxblt.validation import check_bounds, check_fields


@dataclass(frozen=True)
class ReferenceConfig:
    """A term `weight` times KL(reference || model) of the loss, in nats a scored byte (2.1 of 1503.02531).

    The frozen base as reference keeps an adapter close to it; another run's model is imitated, which distils a routed
    adapter into the recipe's model.

    Attributes:
      run: run folder of the reference; None for the frozen base of the recipe.
      weight: of the divergence.
      every: one in so many rows of a batch is compared: the reference's forward pass runs on those rows alone.
      model: config of the reference; filled in from `run` when the run starts.
    """

    run: str | None = None
    weight: float = 0.05
    every: int = 1
    model: Any = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "weight", above=0)
        check_bounds(self, "every", least=1)
        if self.model is not None and not hasattr(self.model, "build"):
            raise ValueError(
                f"ReferenceConfig.model must be None or a model's config, got {self.model!r:.80}"
            )

    def check(self, recipe: Any) -> None:
        """Check that a recipe has a model to compare with, and predicts the next byte, which is compared."""
        if self.run is None and recipe.base_run is None:
            raise ValueError(
                "reference.run is None, which stands for the frozen base, and base_run is None: set one of them to the "
                "folder of a run"
            )
        if not isinstance(recipe.objective, NextByte):
            kind = type(recipe.objective).__name__
            raise ValueError(
                f"reference compares predictions of the next byte, and the objective is {kind}: use NextByte"
            )


@dataclass(frozen=True)
class Reference:
    """A reference as a step knows it.

    Attributes:
      model: a `jaxblt.models.LanguageModel`.
      tree: name of the frozen tree that holds its parameters.
      weight, every: as of `ReferenceConfig`.
    """

    model: Any
    tree: str
    weight: float
    every: int


def every_nth(tree: Any, every: int) -> Any:
    """Return rows 0, n, 2n, ... of arrays [B, ...]: each device keeps rows that it has.

    Raises:
      ValueError: the rows do not divide.
    """
    rows = jax.tree.leaves(tree)[0].shape[0]
    if rows % every:
        raise ValueError(
            f"reference.every = {every} does not divide the {rows} rows of a batch (or micro-batch): use a divisor"
        )
    return jax.tree.map(lambda x: x.reshape(rows // every, every, *x.shape[1:])[:, 0], tree)


def divergence(
    logits: Float[Array, "B T V"], wanted: Float[Array, "B T V"], batch: Batch
) -> Float[Array, ""]:
    """Return the sum over scored bytes of KL(wanted || logits) in nats, weighted by `batch.loss_mask`."""
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32), -1) for x in (jax.lax.stop_gradient(wanted), logits))
    nats = jnp.sum(jnp.exp(p) * (p - q), -1)
    return jnp.sum(nats * batch.loss_mask.astype(jnp.float32))
