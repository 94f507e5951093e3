"""The share of bytes at which a router cuts, over the micro-batches of a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.batch import Batch
from jaxblt.patching.rules import MIDDLE

Route = Callable[[Int[Array, ""], Batch], Float[Array, "B T"]]
"""p of a micro-batch, given its number and its rows."""


def count_cuts(route: Route, numbers: Int[Array, "A"], parts: Batch) -> dict[str, Any]:
    """Return F of all micro-batches, and by micro-batch the weight of its G: A times its share of the bytes.

    The ratio loss is of the whole batch. It needs F before the first backward pass, so each micro-batch passes
    embedding, encoder and router once more.

    Args:
      route: the router.
      numbers: 0, 1, ... of the A micro-batches.
      parts: their rows, [A, rows, ...].
    """

    def count(carry: None, item: tuple[Any, Batch]) -> tuple[None, tuple[Any, Any]]:
        here = item[1].segment_ids > 0
        cuts = (route(*item) > MIDDLE) & here
        return carry, (jnp.sum(cuts, dtype=jnp.float32), jnp.sum(here, dtype=jnp.float32))

    _, (cuts, counts) = jax.lax.scan(count, None, (numbers, parts))
    total = jnp.maximum(jnp.sum(counts), 1.0)
    rate = jnp.sum(cuts) / total
    return {"cut_rate": jnp.broadcast_to(rate, counts.shape), "weight": counts * len(counts) / total}
