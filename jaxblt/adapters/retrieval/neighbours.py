"""The router's part of retrieval: it looks neighbours up where a chunk begins, and holds their features until the next.

The query of chunk k is the base vector of chunk k - lag, which is complete when chunk k begins: no byte of chunk k is
in it. A chunk of holes has no neighbours. There is one query a chunk. A row costs T/C searches, and a decoded byte one
where a chunk of some row begins.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.adapters.code.hold import Held
from jaxblt.adapters.retrieval.features import FEATURES
from jaxblt.adapters.retrieval.index import OWNER_BYTES, features_of, owner_keys, unit
from jaxblt.adapters.retrieval.search import nearest
from jaxblt.layers import named
from jaxblt.mixers.driver.sequence import Rows

INDEX = "index"
"""The child of a router that holds an index."""
MOST = 3.0
"""Bound of features once they are normed."""


class IndexArrays(nn.Module):
    """The arrays of an index as parameters; a frozen base holds them, and a new model's index is empty."""

    capacity: int
    dim: int

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        zeros = nn.initializers.zeros

        def norms(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return jnp.stack([jnp.zeros(shape[1:], dtype), jnp.ones(shape[1:], dtype)])

        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "vectors": ((self.capacity, self.dim), zeros),
            "owners": ((self.capacity, OWNER_BYTES), zeros),
            "center": ((self.dim,), zeros),
            "norms": ((2, len(FEATURES)), norms),
        }
        return {
            name: self.param(name, named(init, *(None,) * len(shape)), shape, jnp.float32)
            for name, (shape, init) in shapes.items()
        }


def search_index(
    index: dict[str, Array], read: tuple[Float[Array, "B N D"], Int[Array, "B N"] | None], *, count: int
) -> Float[Array, "B N F"]:
    """Normed features of the neighbours of base vectors, which documents of these keys do not give.

    Args:
      index: the arrays of `IndexArrays`.
      read: base vectors, and the key of each one's document or None.
      count: neighbours k.
    """
    base, documents = read
    query = base.reshape(-1, base.shape[-1])
    keys, own = (None, None) if documents is None else (owner_keys(index["owners"]), documents.reshape(-1))
    found = nearest(unit(query, index["center"]), index["vectors"], count, owners=keys, own=own)
    found = found._replace(present=found.present & jnp.any(query != 0, -1, keepdims=True))
    mean, spread = index["norms"][0][None], index["norms"][1][None]
    features = jnp.clip((features_of(found, index["vectors"]) - mean) / spread, -MOST, MOST)
    return features.reshape(*base.shape[:2], -1)


def retrieve(
    config: Any,
    rows: Rows,
    base: Float[Array, "B T D"],
    time: Int[Array, "B T"],
    documents: Int[Array, "B T"] | None,
    carry: Float[Array, "B F"] | None,
) -> tuple[Float[Array, "B T F"], Any]:
    """The features at each token, of its chunk's neighbours; zero before chunk `lag`. No gradient flows to queries.

    Called inside the router's compact call: the index becomes its child "index".

    Args:
      config: the `RouterConfig`.
      rows: of the call.
      base: base vector of the chunk `lag` before at each token.
      time: of each token in its document.
      documents: key of each token's document; None leaves nothing out.
      carry: of the state.
    """
    told = config.retrieval
    index = IndexArrays(told.capacity, base.shape[-1], name=INDEX)()
    known = time // config.chunk >= config.lag
    steps = known & (time % config.chunk == 0)
    search = partial(search_index, count=told.neighbours)
    core = Held(jax.lax.stop_gradient(index), search, len(FEATURES), config.chunk)
    found, after = rows.run(core, ((jax.lax.stop_gradient(base), documents), steps), carry)
    return jnp.where(known[..., None], found, 0.0), after
