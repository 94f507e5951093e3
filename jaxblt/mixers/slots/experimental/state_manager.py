"""The importance of a state engine's slots while a model trains: slots that are hardly read are closed."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxblt.layers import named
from jaxblt.side_outputs import sow_metric, sow_next
from jaxblt.validation import check_bounds, check_fields

CLOSED = -1e4
"""Bias of a closed slot: its softmax is exactly 0, and so is the gradient that would open it again."""
IMPORTANCE = "importance"
"""Parameter of an engine with a manager; a train step sets it, and no gradient reaches it."""


@dataclasses.dataclass(frozen=True)
class StateManager:
    """A rule that closes slots which are hardly read during training; used as `StateEngineConfig.manager`.

    The importance of a slot is S times its share of reads, averaged exponentially over steps; 1 is a fair share. A slot
    of little importance is closed (dead): no token writes to it or reads it, so it stays closed. Its parameters do not
    change.

    Attributes:
      decay: decay of the average per step.
      threshold: slots with an importance below this are closed.
    """

    decay: float = 0.9
    threshold: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "decay", least=0, below=1)
        check_bounds(self, "threshold", least=0, below=1, why=": 1 is the mean over slots")

    def update(
        self, importance: Float[Array, "*L H S"] | None, read_mass: Float[Array, "*L H S"]
    ) -> Float[Array, "*L H S"]:
        """Return the importance after a step.

        It stays where the read mass is not finite, as of a step that is skipped.

        Args:
          importance: before it; None at the first step.
          read_mass: share of reads of each slot, which sums to 1 over slots: the metric "state_read_mass" of a layer,
            reshaped to [H, S]. A layer sows it flat.

        Raises:
          ValueError: the read mass has no axes of heads and slots, or another shape than the importance.
        """
        if read_mass.ndim < 2 or (importance is not None and importance.shape != read_mass.shape):
            expected = "[..., heads, slots]" if importance is None else importance.shape
            raise ValueError(
                f"read_mass must have shape {expected}, got {read_mass.shape}: reshape the metric to [heads, slots]"
            )
        now = read_mass.shape[-1] * read_mass
        before = jnp.ones_like(now) if importance is None else importance
        after = now if importance is None else self.decay * importance + (1 - self.decay) * now
        return jnp.where(jnp.isfinite(now), after, before)

    def dead(self, importance: Float[Array, "*L H S"]) -> Bool[Array, "*L H S"]:
        """Return slots below the threshold.

        The most important slot of a head is never among them, as importances average 1.
        """
        return importance < self.threshold

    def closed(self, importance: Float[Array, "H S"]) -> Float[Array, "H S"]:
        """Return what is added to logits and read scores: 0, or `CLOSED` for a dead slot."""
        return jnp.where(self.dead(importance), jnp.float32(CLOSED), jnp.float32(0))


def closed_slots(
    engine: nn.Module, manager: StateManager | None, heads: int, slots: int
) -> Float[Array, "H S"] | None:
    """Return what a manager adds to logits and read scores; None without a manager."""
    if manager is None:
        return None
    flat = engine.param(IMPORTANCE, named(nn.initializers.ones, None), (heads * slots,), jnp.float32)
    return manager.closed(jax.lax.stop_gradient(flat).reshape(heads, slots))


def report_importance(
    engine: nn.Module, manager: StateManager | None, read_mass: Float[Array, "H S"]
) -> None:
    """Tell the train step the next importance, and the log how many slots are dead."""
    if manager is None or engine.is_initializing():
        return
    flat = jax.lax.stop_gradient(nn.meta.unbox(engine.get_variable("params", IMPORTANCE)))
    importance = flat.reshape(read_mass.shape)
    sow_metric(engine, "state_dead", jnp.sum(manager.dead(importance), dtype=jnp.float32))
    sow_next(engine, IMPORTANCE, manager.update(importance, read_mass).reshape(-1))
