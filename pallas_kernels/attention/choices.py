"""The rule whose lists are arrays: blocks of keys chosen for each query, such as by the scores of pooled keys."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from pallas_kernels._compat import count_below
from pallas_kernels.attention.rules import Bounds, Box, Rule


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Chosen(Rule):
    """Keys whose block is in the query's list: key at position p is in block p // block.

    A list belongs to a query by its index and to a key head, not to a position. A block's number counts from
    position 0, so that packed documents, whose positions begin anew, count their own blocks.

    Attributes:
      lists: numbers of blocks; negative ones stand for none. One list for each of `block_q` queries in turn, for each
        key head, or one for all key heads.
      block: positions in a block of keys.
      block_q: queries that share a list.
    """

    lists: Int[Array, "B #G rows n"]
    block: int = field(default=64, metadata={"static": True})
    block_q: int = field(default=1, metadata={"static": True})

    @property
    def grain(self) -> int:
        return self.block

    @property
    def compares_places(self) -> bool:
        return False

    def sees(self, q: Any, k: Any) -> Any:
        """Return whether each query's list has the key's block: bool [B, G, 1, q, s] for k [B, 1, 1, 1, s].

        `lists` are those of the queries in hand, [B, G, 1, q, n].
        """
        del q
        return jnp.any(self.lists[..., None, :] == jnp.asarray(k // self.block)[..., None], -1)

    def bounds(self, box: Box) -> Bounds:
        """Return `some` [B, n, m] for blocks of queries whose lists are [n, B, G, 1, q, count]; `every` stays False."""
        lists = jnp.sort(self.lists.reshape(*self.lists.shape[:2], -1), -1)
        shape = (*lists.shape[:2], box.k.least.shape[-1])

        def count(position: Any, *, equal: bool) -> Array:
            wanted = jnp.broadcast_to(jnp.asarray(position // self.block, jnp.int32)[..., 0, :], shape)
            return jax.vmap(jax.vmap(partial(count_below, equal=equal)))(lists, wanted)

        some = count(box.k.most, equal=True) > count(box.k.least, equal=False)
        return Bounds(jnp.moveaxis(some, 0, 1), jnp.zeros((*shape[1::-1], shape[2]), bool))


def by_query(rule: Rule, queries: int) -> Rule:
    """Return a rule whose lists are one for each query, [B, G, T, n]."""

    def spread(part: Any) -> Any:
        if not isinstance(part, Chosen) or part.block_q == 1:
            return part
        return Chosen(jnp.repeat(part.lists, part.block_q, axis=2)[:, :, :queries], part.block)

    return jax.tree.map(spread, rule, is_leaf=lambda part: isinstance(part, Chosen))


def check_lists(rule: Rule | None, batch: int, queries: int, groups: int, keys: int | None) -> None:
    """Raise ValueError for lists that are not of these queries, or that name blocks which are not there.

    Lists that are traced, and those of positions that are arrays (`keys` is None), may name any block.
    """
    parts = jax.tree.leaves(rule, is_leaf=lambda part: isinstance(part, Chosen))
    for part in (x for x in parts if isinstance(x, Chosen)):
        rows, shape = queries if part.block_q == 1 else -(-queries // part.block_q), part.lists.shape
        if len(shape) != 4 or shape[:3] not in [(batch, groups, rows), (batch, 1, rows)]:
            raise ValueError(
                f"lists of Chosen must have shape [B, G or 1, rows, n] with B = {batch}, G = {groups} and "
                f"rows = T / block_q = {rows}, got {shape}"
            )
        if keys is None or isinstance(part.lists, Tracer | jax.ShapeDtypeStruct):
            continue
        blocks, most = -(-keys // part.block), int(np.max(np.asarray(part.lists), initial=-1))
        if most >= blocks:
            raise ValueError(
                f"lists of Chosen name block {most}, and {keys} keys have {blocks} blocks of {part.block}: number them "
                f"0 to {blocks - 1}, and -1 for none"
            )
