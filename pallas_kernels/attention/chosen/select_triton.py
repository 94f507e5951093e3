"""The choice of blocks on NVIDIA GPUs: one Triton kernel sums shares over heads, another one finds the largest.

Shares are [B, G, T, M] in fp32: they go through memory, scores do not.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import Device, current_device
from pallas_kernels._jax_triton import why_not_on
from pallas_kernels.attention.chosen.places import Places
from pallas_kernels.attention.chosen.triton_gpu import MOST_SHARED, count_strips, cut_strips, join_strips
from pallas_kernels.attention.triton_rows import over_more_rows

MOST_BLOCKS = 1 << 14
"""Blocks of a row, at most: the second kernel holds a query's shares of all of them."""

ROWS, COLUMNS = 128, 64
"""Queries, over all heads of a group, and blocks in a tile of the first kernel."""

HELD = 1 << 13
"""Shares that a program of the second kernel holds, unless one query has more."""

ROOM = 1 << 31
"""Bytes of shares, from which queries are taken in several strips."""


def why_not(device: Device, q: Any, keys: Any, asks: Any, blocks: Any, *, count: int) -> str | None:
    """Return why the kernels cannot run this, or None."""
    del asks, blocks, count
    if (reason := why_not_on(device)) is not None:
        return reason
    if str(q.dtype) not in ("bfloat16", "float16") or q.dtype != keys.dtype:
        return f"it takes bfloat16 and float16 alone, not {q.dtype} and {keys.dtype}"
    share = q.shape[2] // keys.shape[2]
    if q.shape[3] not in (64, 128) or share & (share - 1) or share > MOST_SHARED:
        return (
            f"it takes heads of 64 or 128, and a power of 2 up to {MOST_SHARED} of them with one key head, not {share} "
            f"heads of {q.shape[3]}"
        )
    if 0 in (*q.shape, *keys.shape) or keys.shape[1] > MOST_BLOCKS:
        return f"it takes 1 to {MOST_BLOCKS} blocks, these are {keys.shape[1]}"
    return None


def choose_blocks(
    q: Float[Array, "B T H K"], keys: Float[Array, "B M G K"], asks: Places, blocks: Places, *, count: int
) -> Int[Array, "B T G count"]:
    """Return indices of blocks; what `why_not` refuses is not checked again."""
    length = q.shape[1]
    strips = count_strips(4 * asks.ids.size * keys.shape[1] * keys.shape[2], length, ROOM)
    # Give queries that see nothing an id that no block has.
    asks = Places(jnp.where(asks.ids > 0, asks.ids, -1), asks.numbers)
    q, keys, asks, blocks = jax.tree.unflatten(
        jax.tree.structure((q, keys, asks, blocks)), vary_alike(*jax.tree.leaves((q, keys, asks, blocks)))
    )
    choose = lambda given: _run(_Count(count), *given, keys, blocks)[0]  # noqa: E731
    return join_strips(lax.map(choose, jax.tree.map(partial(cut_strips, strips), (q, asks))), length)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Count:
    """The static side of a call: blocks that a query chooses."""

    value: int


@jax.custom_batching.custom_vmap
def _run(
    count: _Count, q: Float[Array, "B T H K"], asks: Places, keys: Float[Array, "B M G K"], blocks: Places
) -> tuple[Int[Array, "B T G count"]]:
    import jax_triton

    from pallas_kernels.attention.chosen.triton_kernel import block_shares, largest

    (batch, length, heads, width), (many, groups) = q.shape, keys.shape[1:3]
    tokens, wide = ROWS // (heads // groups), 1 << (many - 1).bit_length()
    rows = max(1, HELD // wide)
    major, minor = current_device().capability or (9, 0)
    sizes = {"T": length, "BLOCKS": many, "GROUPS": groups, "num_stages": 2}
    sizes |= {"compute_capability": 10 * major + minor}
    shares = jax_triton.triton_call(
        *(q, keys, *asks, *blocks),
        kernel=block_shares,
        out_shape=jax.ShapeDtypeStruct((batch, groups, length, many), jnp.float32),
        grid=(-(-length // tokens) * batch * groups,),
        name="block_shares",
        num_warps=8,
        HEADS=heads,
        WIDTH=width,
        SCALE=width**-0.5,
        TOKENS=tokens,
        COLUMNS=COLUMNS,
        **sizes,
    )
    found = jax_triton.triton_call(
        *(shares, *asks, *blocks),
        kernel=largest,
        out_shape=jax.ShapeDtypeStruct((batch, length, groups, count.value), jnp.int32),
        grid=(-(-length // rows) * batch * groups,),
        name="largest",
        num_warps=4 if rows > 1 else 8,
        COUNT=count.value,
        ROWS=rows,
        WIDE=wide,
        **sizes,
    )
    return (found,)


_run.def_vmap(over_more_rows(_run))
