"""The router's part of retrieval: it looks neighbours up where a chunk begins, and holds their features until the next.

The query of chunk k is the base vector of chunk k - lag, which is complete when chunk k begins: no byte of chunk k is
in it. A chunk of holes has no neighbours. There is one query a chunk. A row costs T/C searches, and a decoded byte one
where a chunk of some row begins.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.memory import step_places
from jaxblt.adapters.retrieval.features import FEATURES
from jaxblt.adapters.retrieval.index import OWNER_BYTES, features_of, owner_keys, unit
from jaxblt.adapters.retrieval.search import nearest
from jaxblt.layers import named
from jaxblt.mixers.marks import Marks
from jaxblt.mixers.sequence import Rows

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


@flax.struct.dataclass
class Neighbours:
    """Core of features that are looked up at steps and held between them.

    Streams are base vectors [B, T, D], where a step is taken [B, T], and the key of each token's document [B, T] or
    None. Steps are at least `size` tokens apart.

    Attributes:
      index: the arrays of `IndexArrays`.
      size: tokens of a chunk.
      count: neighbours k.
    """

    index: dict[str, Array]
    size: int = flax.struct.field(pytree_node=False)
    count: int = flax.struct.field(pytree_node=False)

    def zero(self, streams: Any) -> Float[Array, "B F"]:
        """No feature is known."""
        return _zeros(streams[0][:, 0])

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B F"] | None
    ) -> tuple[Float[Array, "B T F"], tuple[Bool[Array, "B 1"], Float[Array, "B F"]]]:
        """The features of the latest step at each token, and what the stretch leaves: whether, and which."""
        steps, count = _counted(streams[1], marks)
        place = step_places(steps, count, self.size)
        found = self._features(streams, place)
        start = self.zero(streams) if carry is None else carry
        held = jnp.concatenate([start[:, None], found], 1)
        last = count[:, -1:]
        after = jnp.take_along_axis(held, last[..., None], 1)[:, 0]
        return jnp.take_along_axis(held, count[..., None], 1), (last > 0, after)

    def summarise(self, streams: Any, marks: Marks) -> tuple[Bool[Array, "B 1"], Float[Array, "B F"]]:
        """What the stretch leaves: one search instead of one a chunk."""
        steps, count = _counted(streams[1], marks)
        index = jnp.arange(steps.shape[1], dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(steps, index, 0), 1, keepdims=True)
        return count[:, -1:] > 0, self._features(streams, last)[:, 0]

    def join(self, carry: Float[Array, "B F"], summary: tuple[Any, Any]) -> Float[Array, "B F"]:
        """The features behind the stretch."""
        some, features = summary
        return jnp.where(some, features, carry)

    def _features(self, streams: Any, place: Int[Array, "B N"]) -> Float[Array, "B N F"]:
        """Normed features of the queries at these places; nothing is searched where no row takes a step."""
        base, steps, documents = streams
        last = steps.shape[1] - 1
        taken = jnp.minimum(place, last)
        query = jnp.take_along_axis(base, taken[..., None], 1).reshape(-1, base.shape[-1])
        own = None if documents is None else jnp.take_along_axis(documents, taken, 1).reshape(-1)

        def search(query: Array, own: Array | None, index: dict[str, Array]) -> Array:
            keys = None if own is None else owner_keys(index["owners"])
            found = nearest(unit(query, index["center"]), index["vectors"], self.count, owners=keys, own=own)
            found = found._replace(present=found.present & jnp.any(query != 0, -1, keepdims=True))
            mean, spread = index["norms"][0][None], index["norms"][1][None]
            return jnp.clip((features_of(found, index["vectors"]) - mean) / spread, -MOST, MOST)

        some = jnp.any(jnp.take_along_axis(steps, taken, 1) & (place <= last))
        found = jax.lax.cond(some, search, lambda query, own, index: _zeros(query), query, own, self.index)
        return found.reshape(*place.shape, -1)


def _zeros(like: Float[Array, "B D"]) -> Float[Array, "B F"]:
    """Zeros that lie on devices as `like` does."""
    return jnp.zeros_like(jnp.broadcast_to(like[:, :1], (len(like), len(FEATURES))))


def _counted(steps: Bool[Array, "B T"], marks: Marks) -> tuple[Bool[Array, "B T"], Int[Array, "B T"]]:
    """Steps at what is a token or a hole, and how many there were up to each."""
    if marks.segment_ids is not None:
        steps = steps & (marks.segment_ids != 0)
    return steps, jnp.cumsum(steps, axis=1, dtype=jnp.int32)


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
    core = Neighbours(jax.lax.stop_gradient(index), config.chunk, told.neighbours)
    found, after = rows.run(core, (jax.lax.stop_gradient(base), steps, documents), carry)
    return jnp.where(known[..., None], found, 0.0), after
