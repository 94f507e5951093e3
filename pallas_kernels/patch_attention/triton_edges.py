"""Triton: where among a block's bytes each patch begins, in one launch instead of a dozen small ones of XLA."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int

from pallas_kernels._hopper import varying_like
from pallas_kernels._pallas_triton import launch, span

AT_ONCE = 128
"""Patches of a program."""


def find_edges(
    ids: Int[Array, "N S"], ends: Int[Array, "N"], count: int, *, interpret: bool
) -> Int[Array, "N edges"]:
    """Count the bytes before those whose patch is r or later, for r = 0 .. count.

    Args:
      ids: of a block's bytes, which do not fall before its `ends`; from there on they are taken to be `count`.
    """
    blocks, size = ids.shape
    parts = -(-(count + 1) // AT_ONCE)
    kernel = partial(_search, size=size, count=count, parts=parts)
    out = varying_like(ids, (blocks, count + 1), jnp.int32)
    arrays, options = (ids, ends), {"warps": 1, "stages": 1, "interpret": interpret}
    return launch(kernel, "patch_attention_edges", blocks * parts, out, arrays, **options)


def _search(ids: Any, ends: Any, edges: Any, *, size: int, count: int, parts: int) -> None:
    """Bisect for 128 patches of one block."""
    block, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
    first, end = part * AT_ONCE, ends[block]
    wanted = span(first, AT_ONCE)
    found = jnp.zeros(AT_ONCE, jnp.int32)
    for bit in reversed(range(size.bit_length())):
        ahead = found + (1 << bit)
        below = pltriton.load(ids.at[block, jnp.minimum(ahead, size) - 1]) < wanted
        found = jnp.where((ahead <= end) & below, ahead, found)
    pltriton.store(edges.at[block, pl.ds(first, AT_ONCE)], found + block * size, mask=wanted <= count)
