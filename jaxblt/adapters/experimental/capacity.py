"""Capacity of experts: how often one may be chosen in a stretch of a document. What is beyond it is dropped."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.code.draw import Draw
from jaxblt.adapters.code.pools import Smooth
from jaxblt.adapters.code.sticky import Sticky
from jaxblt.adapters.code.transforms import TopK
from jaxblt.side_outputs import sow_metric
from jaxblt.validation import check_bounds, check_fields

Counts = tuple[Float[Array, "B 1"], Float[Array, "B E"]]
"""Choices of a document so far, and how often each expert was asked for in the open window."""

CHOOSING = (TopK, Sticky, Draw)
"""Transforms that name some experts and set the numbers of the others to 0."""


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Code of a bank in which an expert acts at most ceil(factor k window / E) times in each window of choices.

    A choice is a new code: a token's, or a chunk's. k is how many experts a choice names by the transforms before this
    one. Choices count from a document's start, so codes are causal and any split into calls gives the same. From left
    to right, what exceeds the capacity is dropped: the expert's number is 0, and the others stay as they are (Switch,
    2101.03961, sec. 2.2). With k = E and a factor of 1 or more nothing is dropped.

    Sows the metric "drops", [E]: tokens at which each expert was dropped. Counts are exact up to 2^24 choices a
    document.

    Attributes:
      factor: room above an even use of all experts.
      window: choices after which all experts are free again.
    """

    factor: float = 1.25
    window: int = 64

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "factor", above=0)
        check_bounds(self, "window", least=1)

    def check(self, adapter: Any) -> None:
        """Raise ValueError for a code that is no bank's, or one that a document has once."""
        if adapter.blocks is None:
            raise ValueError(
                "Capacity is of the experts of a bank, and blocks is None: set the number of experts"
            )
        if adapter.router.level == "prefix":
            raise ValueError(
                "Capacity counts choices along a document, and level 'prefix' gives it one: leave it out"
            )

    def init_state(self, batch_size: int, numbers: int) -> Counts:
        """Return no choices."""
        return jnp.zeros((batch_size, 1), jnp.float32), jnp.zeros((batch_size, numbers), jnp.float32)

    def most(self, adapter: Any) -> int:
        """Return how often an expert may act in a window."""
        # Round first: 1.1 * 10 / 11 is above 1 in floats, and would be 2
        return math.ceil(round(self.factor * _named(adapter) * self.window / adapter.blocks, 6))

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the code without what exceeds the capacity."""
        before = (None, None) if state is None else state
        starts = (moment.changes & moment.known)[..., None]
        one = jnp.ones(starts.shape, jnp.float32)
        count, counted = rows.run(Smooth(), (one, jnp.where(starts, 1.0, 0.0)), before[0])
        fresh = starts & (count % self.window == (1 % self.window))
        wanted = code != 0
        asked, used = rows.run(
            Smooth(), (jnp.where(fresh, 0.0, 1.0), jnp.where(starts & wanted, 1.0, 0.0)), before[1]
        )
        adapter = router.adapter  # pyright: ignore[reportAttributeAccessIssue]
        drops = wanted & (asked > self.most(adapter)) & moment.known[..., None]
        told = drops if rows.content is None else drops & rows.content[..., None]
        sow_metric(router, "drops", jnp.sum(told, (0, 1), dtype=jnp.float32))
        return jnp.where(drops, 0.0, code), (counted, used)


def _named(adapter: Any) -> int:
    """Return how many experts a choice names behind a bank's transforms."""
    limits = [part.k if isinstance(part, TopK) else 1 for part in adapter.code if isinstance(part, CHOOSING)]
    return min([adapter.blocks, *limits])
