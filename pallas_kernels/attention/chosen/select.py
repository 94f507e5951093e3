"""The choice of blocks: those that the heads of a group attend to most, told by one key a block."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch
from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Implementation
from pallas_kernels.attention.chosen import select_triton
from pallas_kernels.attention.chosen.places import Places

STRIP = 256
"""Queries whose scores of all blocks the XLA form holds at a time."""


@checked
def choose_blocks(
    q: Float[Array, "B T H K"],
    keys: Float[Array, "B M G K"],
    asks: Places,
    blocks: Places,
    *,
    count: int,
    implementation: Literal["triton", "xla", "reference"] | None = None,
) -> Int[Array, "B T G count"]:
    """Return the indices of the blocks that heads of a group attend to most, the best first; -1 where there are fewer.

    Shares of softmax attention to the blocks' keys, in fp32, are summed over the query heads of a key head (native
    sparse attention, 2502.11089, eq. 10). There is no gradient. Of equal shares the earlier block is taken.

    Args:
      q: queries, H heads.
      keys: one key a block, G heads; H is a multiple of G.
      asks: documents of the queries, and numbers: a query chooses among blocks of its document with lower numbers.
      blocks: documents and numbers of the blocks.
      count: blocks that a query chooses.
      implementation: which to run; the best for the device and these arguments if None.

    Raises:
      ValueError: heads or `count` do not fit, or the implementation cannot run this here.
    """
    heads, groups = q.shape[2], keys.shape[2]
    if groups < 1 or heads % groups or count < 1:
        raise ValueError(
            f"choose_blocks needs H = {heads} query heads to divide by G = {groups} key heads, and count >= 1, got "
            f"count = {count}"
        )
    q, keys = lax.stop_gradient((q, keys))
    given = (q, keys, asks, blocks)
    device = _dispatch.current_device()
    entry = _dispatch.choose("choose_blocks", TABLE, implementation, device, *given, count=count)
    return entry.run(*given, count=count)


def choose_by_strips(
    q: Float[Array, "B T H K"], keys: Float[Array, "B M G K"], asks: Places, blocks: Places, *, count: int
) -> Int[Array, "B T G count"]:
    """Choose in strips of `STRIP` queries."""
    batch, length = asks.ids.shape
    strips = -(-length // STRIP)
    size = -(-length // strips)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, strips * size - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, strips, size, *x.shape[2:]), 1, 0)

    def choose(given: tuple[Array, Places]) -> Array:
        return choose_at_once(given[0], keys, given[1], blocks, count=count)

    chosen = lax.map(choose, jax.tree.map(cut, (q, asks)))
    return jnp.moveaxis(chosen, 0, 1).reshape(batch, strips * size, keys.shape[2], count)[:, :length]


def choose_at_once(
    q: Float[Array, "B T H K"], keys: Float[Array, "B M G K"], asks: Places, blocks: Places, *, count: int
) -> Int[Array, "B T G count"]:
    """Choose by the shares of all queries, which it holds."""
    seen = asks.see(blocks)[:, None, None]
    shares = jax.nn.softmax(jnp.where(seen, score_blocks(q, keys), -1e30), -1)
    shares = jnp.sum(jnp.where(seen, shares, -1.0), 2)
    # Leave room behind the blocks, as there may be fewer than are chosen.
    shares = jnp.pad(shares, ((0, 0), (0, 0), (0, 0), (0, count)), constant_values=-1.0)
    found, best = lax.top_k(shares, count)
    return jnp.where(found >= 0, best, -1).swapaxes(1, 2)


def score_blocks(q: Float[Array, "B T H K"], keys: Float[Array, "B M G K"]) -> Float[Array, "B G R T M"]:
    """Return the products of the R query heads of each key head with keys of blocks, in fp32, over the root of K."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, keys.shape[2], heads // keys.shape[2], width)
    return jnp.einsum("btgrk,bmgk->bgrtm", q, keys, preferred_element_type=jnp.float32) * width**-0.5


TABLE = (
    Implementation("triton", select_triton.choose_blocks, select_triton.why_not),
    Implementation("xla", choose_by_strips),
    Implementation("reference", choose_at_once),
)
"""Fastest first."""
