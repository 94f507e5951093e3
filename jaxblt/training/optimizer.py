"""AdamW with warm-up, cosine decay to a floor, clipping by global norm, and a weight-decay mask."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxblt.validation import check_bounds, check_fields

STACKED = "layers"
TABLES = ("vocab", "hash")
FILTERS = ("modes", "taps")


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter, 1711.05101) with a warm-up and cosine schedule.

    Attributes:
      learning_rate: the peak.
      warmup_steps: steps of linear rise from 0 to the peak.
      decay_steps: step at which the floor is reached; None takes the run's number of steps.
      floor: the last learning rate as a fraction of the peak.
      b1, b2, eps: of the moments.
      weight_decay: pull towards 0 per step and unit of learning rate; matrices only.
      decay_embeddings: whether embedding and hash tables are decayed as well.
      clip_norm: the gradient's global norm is cut to this; None for no clipping.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    decay_steps: int | None = None
    floor: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "learning_rate", "eps", above=0)
        check_bounds(self, "warmup_steps", least=0)
        check_bounds(self, "decay_steps", least=1, why=": None takes the run's steps")
        check_bounds(self, "floor", least=0, most=1, why=": it is a fraction of the peak")
        check_bounds(self, "weight_decay", least=0)
        check_bounds(self, "clip_norm", above=0, why=": None clips nothing")
        check_bounds(self, "b1", "b2", least=0, below=1)


def make_schedule(config: AdamWConfig, steps: int) -> optax.Schedule:
    """Learning rate by update: p·t/w for t < w, then p·(f + (1-f)·(1+cos(π(t-w)/(e-w)))/2), and p·f from e on.

    p is the peak, w the warm-up, e the decay's end, f the floor.

    Args:
      config: of the optimiser.
      steps: of the run; the decay's end unless `config.decay_steps` says otherwise.

    Raises:
      ValueError: the warm-up does not end before the decay does.
    """
    end = steps if config.decay_steps is None else config.decay_steps
    if config.warmup_steps >= end:
        raise ValueError(
            f"warmup_steps = {config.warmup_steps} must be less than the decay's end, step {end}"
        )
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=end,
        end_value=config.floor * config.learning_rate,
    )
    return lambda count: schedule(jnp.asarray(count, jnp.float32))


def make_optimizer(config: AdamWConfig, steps: int, boxed: Any) -> optax.GradientTransformation:
    """Clip, then AdamW by the schedule. `boxed` are the parameters (or their shapes) with their logical axis names."""
    mask = decay_mask(boxed, embeddings=config.decay_embeddings)
    adamw = optax.adamw(
        make_schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=mask,
    )
    if config.clip_norm is None:
        return _lenient(adamw)
    return _lenient(optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw))


def _lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` for callers with strict dtype promotion: optax raises float32 to the power of an int32 count."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def decay_mask(boxed: Any, *, embeddings: bool = False) -> Any:
    """True for the parameters that weight decay applies to: matrices.

    Not norms, biases, tables (unless `embeddings`) or anything with a "modes" or "taps" axis (poles, residues, taps).
    The "layers" axis of a scanned stack does not make a vector a matrix.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _decays(path, leaf, embeddings), boxed, is_leaf=_is_boxed
    )


def axis_names(leaf: Any) -> tuple[str | None, ...]:
    """Logical axis names of a boxed parameter; None for each axis that has no name."""
    if _is_boxed(leaf):
        return tuple(getattr(leaf, "names", (None,) * leaf.unbox().ndim))
    return (None,) * leaf.ndim


def _is_boxed(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def _decays(path: tuple[Any, ...], leaf: Any, embeddings: bool) -> bool:
    names = [name for name in axis_names(leaf) if name != STACKED]
    own = [str(getattr(entry, "key", entry)) for entry in path][-1]
    if len(names) < 2 or own == "scale" or own.endswith("bias"):
        return False
    if any(name in FILTERS for name in names):
        return False
    is_table = names[0] in TABLES or own == "embedding"
    return embeddings if is_table else True
