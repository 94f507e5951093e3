"""The state of a state engine, and how unevenly its routes start."""

import flax.struct
from jaxtyping import Array, Float

from jaxblt.mixers.driver.base import Clock
from jaxblt.mixers.slots.state_edges import Cell, Engine
from jaxblt.mixers.slots.state_slots import Slots
from jaxblt.show import show

ROUTE_SPREAD = 4.0
"""Standard deviation of the routes' logits at the start, for inputs of 1: nearly even routes keep all slots alike."""


@flax.struct.dataclass
class StateEngineState:
    """State of a state engine, of constant size.

    Attributes:
      clock: where each row stands.
      short: the last taps - 1 inputs of the convolutions of q, k and v.
      engine: the slots, with what edges need if there are edges.
      counted: sums over the document's tokens, for an adaptive count.
      levels: slots of each level.
      cell: how slots move at an edge.
      interval: tokens from edge to edge; None without edges.
    """

    clock: Clock
    short: tuple[Float[Array, "B _ S"], ...]
    engine: Slots | Engine
    counted: Float[Array, "B E"] | None
    levels: tuple[int, ...] = flax.struct.field(pytree_node=False)
    cell: Cell | None = flax.struct.field(pytree_node=False)
    interval: int | None = flax.struct.field(pytree_node=False)

    __repr__ = show

    @property
    def adaptive_count(self) -> bool:
        """True if the tokens' number of slots depends on the document."""
        return self.counted is not None

    @property
    def slots(self) -> Slots:
        """The slots' contents."""
        return self.engine.slots if isinstance(self.engine, Engine) else self.engine
