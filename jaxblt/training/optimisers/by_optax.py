"""Optimisers beside AdamW: Lion, Adafactor and Muon, by optax."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import optax
from optax import contrib

from jaxblt.training.optimisers.adamw import (
    STACKED,
    AdamWConfig,
    OptimizerConfig,
    axis_names,
    decay_mask,
    is_boxed,
)
from jaxblt.validation import check_bounds

MODEL = "embed"
"""The logical axis of the model's width: a weight maps from it or to it."""
HEAD = "vocab"


@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """Lion (Chen et al., 2302.06675): steps by the sign of an average. Rates are 3 to 10 times lower than AdamW's.

    Attributes:
      b1: weight of the average in the direction of a step.
      b2: decay of the average.
    """

    learning_rate: float = 1e-4
    b1: float = 0.9
    b2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "b1", "b2", least=0, below=1)

    def transform(self, rate: optax.Schedule, mask: Any, boxed: Any) -> optax.GradientTransformation:
        return optax.lion(rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay, mask=mask)


@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer & Stern, 1804.04235): second moments of a matrix as one row and one column of numbers.

    Steps are relative to a parameter's own size, and are clipped to a root mean square of 1 before that.

    Attributes:
      learning_rate: the peak of the relative step.
      decay_rate: the average forgets as 1 - t^-decay_rate.
      least_factored: matrices with both axes at least this long are factored.
    """

    learning_rate: float = 1e-2
    decay_rate: float = 0.8
    least_factored: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "decay_rate", above=0, most=1)
        check_bounds(self, "least_factored", least=2)

    def transform(self, rate: optax.Schedule, mask: Any, boxed: Any) -> optax.GradientTransformation:
        moments = optax.scale_by_factored_rms(
            decay_rate=self.decay_rate, min_dim_size_to_factor=self.least_factored
        )
        clip, size = optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
        return optax.chain(moments, clip, size, *_tail(self, rate, mask))


@dataclass(frozen=True)
class MuonConfig(AdamWConfig):
    """Muon (Jordan et al. 2024) for matrices inside the model, and Adam with Nesterov's momentum for the rest.

    The average of a matrix's gradients is made orthogonal. Its size is then matched to that of an Adam step (Liu et
    al., 2502.16982, sec. 2.2), so that one learning rate serves both. Tables, the head, norms, biases and filters take
    Adam.

    Attributes:
      momentum: decay of the average of a matrix's gradients.
    """

    momentum: float = 0.95

    bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "momentum", least=0, below=1)

    def transform(self, rate: optax.Schedule, mask: Any, boxed: Any) -> optax.GradientTransformation:
        matrices = muon_axes(boxed)
        direction = contrib.muon(
            1.0,
            beta=self.momentum,
            eps=self.eps,
            adam_b1=self.b1,
            adam_b2=self.b2,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=matrices,
        )
        return optax.chain(direction, optax.scale(-1.0), *_tail(self, rate, mask))


def _tail(
    config: OptimizerConfig, rate: optax.Schedule, mask: Any
) -> tuple[optax.GradientTransformation, ...]:
    """Make decay and the learning rate, of a direction."""
    return optax.add_decayed_weights(config.weight_decay, mask), optax.scale_by_learning_rate(rate)


def muon_axes(boxed: Any) -> Any:
    """Return for each parameter the axes that its product sums over and makes; None for those that Adam updates.

    A weight maps from the model's width or to it: q [embed, heads, head_dim] sums over the first axis, the output
    projection [heads, head_dim, embed] over all but the last. The axis of a scanned stack is a batch of matrices.
    """
    return jax.tree.map(
        lambda leaf, decays: _muon_axes(leaf) if decays else None, boxed, decay_mask(boxed), is_leaf=is_boxed
    )


def _muon_axes(leaf: Any) -> contrib.MuonDimensionNumbers | None:
    names = axis_names(leaf)
    own = [i for i, name in enumerate(names) if name != STACKED]
    if HEAD in names:
        return None
    if names[own[0]] != MODEL and names[own[-1]] == MODEL:
        return contrib.MuonDimensionNumbers(tuple(own[:-1]), (own[-1],))
    if names[own[0]] == MODEL or len(own) == 2:
        return contrib.MuonDimensionNumbers((own[0],), tuple(own[1:]))
    return None


Optimizer = AdamWConfig | LionConfig | AdafactorConfig | MuonConfig
"""Any of them."""
