"""AdamW, and what all optimisers share: clipping by global norm and a weight-decay mask."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import optax

from jaxblt.models.stack import StackConfig
from jaxblt.training.optimisers.norm import clip_by_global_norm
from jaxblt.training.optimisers.patterns import depth_scales, rate_scales
from jaxblt.training.optimisers.schedule import ScheduleConfig, make_schedule
from jaxblt.validation import check_bounds

STACKED = "layers"
TABLES = ("vocab", "hash")
FILTERS = ("modes", "taps")


class Bounded(optax.GradientTransformation):
    """An optimiser whose updates are finite if its learning rate, its state, parameters and the gradient's norm are.

    A step need not wait for a look at all of them before it writes the first.
    """


@dataclass(frozen=True)
class OptimizerConfig(ScheduleConfig, ABC):
    """Settings that all optimisers have: a schedule, weight decay and clipping.

    Attributes:
      weight_decay: pull towards 0 per step and unit of learning rate; matrices only.
      decay_embeddings: whether embedding and hash tables are decayed as well.
      clip_norm: the gradient's global norm is cut to this; None for no clipping.
      layer_decay: factor of the learning rate from a block to the one below, see `depth_scales`; 1 for one rate.
      rates: (pattern, factor) pairs: factors of the learning rate of parameters whose paths match, such as
        ("*/router/*", 2.0) for those of an adapter's router; 0 keeps what is new in a run as it begins (`Recipe.freeze`
        spares the gradients of what is not). Of several that match, their product.
    """

    weight_decay: float = 0.1
    decay_embeddings: bool = False
    clip_norm: float | None = 1.0
    layer_decay: float = 1.0
    rates: tuple[tuple[str, float], ...] = ()

    bounded: ClassVar[bool] = False
    """Whether it is `Bounded`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "weight_decay", least=0)
        check_bounds(self, "clip_norm", above=0, why=": None clips nothing")
        self._check_read("decay_embeddings", "weight_decay above 0", self.weight_decay > 0)
        check_bounds(self, "layer_decay", above=0, most=1, why=": it is a factor, 1 for one rate")
        for pattern, factor in self.rates:
            if factor < 0:
                raise ValueError(
                    f"{type(self).__name__}.rates: the factor of {(pattern, factor)} must be at least 0, which keeps "
                    "parameters as they are: set it so"
                )

    @abstractmethod
    def transform(self, rate: optax.Schedule, mask: Any, boxed: Any) -> optax.GradientTransformation:
        """Make updates from clipped gradients.

        Args:
          rate: learning rate by update.
          mask: True for the parameters that are decayed.
          boxed: the parameters, or their shapes, with their logical axis names.
        """


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, 1711.05101).

    Attributes:
      b1, b2, eps: of the moments.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "eps", above=0)
        check_bounds(self, "b1", "b2", least=0, below=1)

    def transform(self, rate: optax.Schedule, mask: Any, boxed: Any) -> optax.GradientTransformation:
        return optax.adamw(
            rate, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=mask
        )


def make_optimizer(
    config: OptimizerConfig, steps: int, boxed: Any, stacks: Mapping[str, StackConfig] | None = None
) -> optax.GradientTransformation:
    """Clip, then update by the schedule, by depth if `config.layer_decay` says so, and by `config.rates`.

    Args:
      config: of the optimiser.
      steps: of the run.
      boxed: parameters (or their shapes) with their logical axis names.
      stacks: of the model, in the order in which bytes pass them; a decay by layer needs them.

    Raises:
      ValueError: there is a decay by layer and the model names no stacks, or a pattern of `rates` matches nothing.
    """
    mask = decay_mask(boxed, embeddings=config.decay_embeddings)
    update = config.transform(make_schedule(config, steps), mask, boxed)
    if config.clip_norm is not None:
        update = optax.chain(clip_by_global_norm(config.clip_norm), update)
    if config.layer_decay != 1:
        if not stacks:
            raise ValueError(
                f"layer_decay = {config.layer_decay} goes by blocks, and the model names no `stacks`: set it to 1"
            )
        update = _scaled(update, depth_scales(boxed, stacks, config.layer_decay))
    if config.rates:
        update = _scaled(update, rate_scales(boxed, config.rates))
    return _lenient(update, Bounded if config.bounded else optax.GradientTransformation)


def _scaled(update: optax.GradientTransformation, scales: Any) -> optax.GradientTransformation:
    return optax.chain(update, optax.stateless(lambda updates, _: jax.tree.map(_times, updates, scales)))


def _times(update: Any, scale: Any) -> Any:
    return update * scale.astype(update.dtype)


def _lenient(
    optimizer: optax.GradientTransformation, kind: type[optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Let `optimizer` run under strict dtype promotion: optax raises float32 to the power of an int32 count."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return kind(optimizer.init, update)


def decay_mask(boxed: Any, *, embeddings: bool = False) -> Any:
    """Mark the parameters that weight decay applies to: matrices.

    Not scales (of norms, for example), biases, tables (unless `embeddings`) or anything with a "modes" or "taps" axis
    (poles, residues, taps). The "layers" axis of a scanned stack does not make a vector a matrix.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _decays(path, leaf, embeddings), boxed, is_leaf=is_boxed
    )


def axis_names(leaf: Any) -> tuple[str | None, ...]:
    """Return logical axis names of a boxed parameter; None for each axis that has no name."""
    if is_boxed(leaf):
        return tuple(getattr(leaf, "names", (None,) * leaf.unbox().ndim))
    return (None,) * leaf.ndim


def is_boxed(leaf: Any) -> bool:
    """Return whether a parameter comes with its logical axis names."""
    return isinstance(leaf, nn.meta.AxisMetadata)


def _decays(path: tuple[Any, ...], leaf: Any, embeddings: bool) -> bool:
    names = [name for name in axis_names(leaf) if name != STACKED]
    own = [str(getattr(entry, "key", entry)) for entry in path][-1]
    if len(names) < 2 or own.endswith(("scale", "bias")):
        return False
    if any(name in FILTERS for name in names):
        return False
    is_table = names[0] in TABLES or own == "embedding"
    return embeddings if is_table else True
