"""Parts of the Hopper kernels of convolutions: tiles of 64 chunks of 64 steps, and products of them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._hopper import CHUNK, ROWS

STAGES = 2
"""Tiles whose loads are under way or in use at a time; three were 1 to 2 % slower on an H200."""

CHUNK_BY_CHUNK = (
    plgpu.TilingTransform((1, CHUNK)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(2 * CHUNK),  # pyright: ignore[reportAbstractUsage]
)
"""The same bytes as in `tile_ref`, for copies that start at any chunk: those of groups of 8 start at multiples of 8."""


def chunks_ref(*shape: int, dtype: Any) -> Any:
    """Return scratch for tiles that the copy engine moves from or to any chunk.

    It is no operand of tensor cores.
    """
    return plgpu.SMEM(shape, dtype, transforms=CHUNK_BY_CHUNK)


def read(ref: Any) -> Array:
    """Read a tile from shared memory into registers, as tensor cores take their left operand."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def add_products(
    totals: Sequence[Array], left: Sequence[Any], right: Any, interpret: bool
) -> tuple[Array, ...]:
    """Return total_l + left_l^T @ right.

    All lie in shared memory, except the fp32 totals, which stay in registers.
    """
    if interpret:  # The simulation knows no accumulator that starts from a value.
        products = (jnp.dot(a[...].T, right[...], preferred_element_type=jnp.float32) for a in left)
        return tuple(total + product for total, product in zip(totals, products, strict=True))

    def accumulate(refs: Sequence[Any]) -> None:
        for ref, a in zip(refs, left, strict=True):
            plgpu.wgmma(ref, a.T, right)

    run: Any = pl.run_state(accumulate)
    return run(tuple(plgpu.WGMMAAccumulatorRef.init(total) for total in totals))


def zeros() -> Array:
    """Return a tile of fp32 zeros, laid out as an accumulator."""
    return plgpu.layout_cast(jnp.zeros((ROWS, CHUNK), jnp.float32), plgpu.Layout.WGMMA)
