"""A read: it looks neighbours up where a chunk begins, and keeps their features until the next chunk.

The query of chunk k is the base vector of chunk k - lag, which is complete when chunk k begins: no byte of chunk k is
in it. A chunk of holes has no neighbours. There is one query a chunk. A row costs T/C searches, and a decoded byte one
where a chunk of some row begins.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.adapters.code.latest_values import LatestValues
from jaxblt.adapters.code.levels import Level
from jaxblt.adapters.code.reads import Features, Read, RouterInput
from jaxblt.adapters.retrieval.features import FEATURES
from jaxblt.adapters.retrieval.index import OWNER_BYTES, features_of, owner_keys, unit
from jaxblt.adapters.retrieval.search import nearest
from jaxblt.layers import named
from jaxblt.validation import check_bounds, check_fields

INDEX = "index"
"""The child of a router that holds an index."""
MOST = 3.0
"""Bound of features once they are normed."""


class IndexArrays(nn.Module):
    """Arrays of an index as parameters; a frozen base holds them, and a new model's index is empty."""

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
    """Return normed features of the neighbours of base vectors, which documents of these keys do not give.

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


@dataclasses.dataclass(frozen=True)
class Neighbours(Read):
    """Six features of the chunks of an index that are nearest to the chunk that lies `lag` before the token's.

    The index lies among the parameters of the frozen base, so a run keeps it and nothing trains it. Another index takes
    its place without a new program, as long as `capacity` holds its chunks. No gradient flows to queries.

    Attributes:
      index: folder of the index, read once, when a run over its `base_run` starts.
      capacity: the most chunks of an index; places without a chunk are empty and cost as much as others. Above 1,024
        each search copies the index, unless this is a multiple of 1,024.
      count: k, chunks that are looked at; there may be fewer.
    """

    index: str = "index"
    capacity: int = 16384
    count: int = 8
    name: ClassVar[str] = "neighbours"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "capacity", "count", least=1)
        if self.count > self.capacity:
            raise ValueError(
                f"Neighbours.count = {self.count} is more than capacity = {self.capacity} chunks: use fewer"
            )

    @classmethod
    def upgrade(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Return fields as an earlier version stored them: `neighbours` for `count`."""
        return {"count" if name == "neighbours" else name: value for name, value in stored.items()}

    def check(self, config: Any) -> None:
        """Raise ValueError for a router that does not read the input of a stack."""
        super().check(config)
        if config.per == "block":
            raise ValueError(
                f"RouterConfig.per = 'block' and reads = {config.reads}: an index holds vectors of the stack's input, "
                "so set per='stack' or leave Neighbours out"
            )

    def zero(self, config: Any, batch_size: int, dim: int) -> Float[Array, "B F"]:
        """Return features of no neighbours."""
        return jnp.zeros((batch_size, len(FEATURES)), jnp.float32)

    def width(self, config: Any, dim: int, level: Level) -> int:
        """Return the number of features, 0 for a prefix."""
        return 0 if level == "prefix" else len(FEATURES)

    def hear(self, router: nn.Module, call: RouterInput, state: Any) -> tuple[Features, Any]:
        """Return the features of the neighbours of each token's chunk; zero before chunk `lag`."""
        base = jax.lax.stop_gradient(call.base_vector)
        index = IndexArrays(self.capacity, base.shape[-1], name=INDEX, parent=router)()
        known = call.chunk >= call.config.lag
        search = partial(search_index, count=self.count)
        core = LatestValues(jax.lax.stop_gradient(index), search, len(FEATURES), call.config.chunk)
        read = (base, call.beside.get("documents"))
        found, after = call.rows.run(core, (read, known & call.starts_chunk), state)
        found = jnp.where(known[..., None], found, 0.0)
        return {"chunk": found, "token": found}, after
