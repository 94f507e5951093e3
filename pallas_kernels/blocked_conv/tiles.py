"""What both Hopper kernels share: matrices of the filter, and tiles that start at any chunk of a buffer."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._conv.toeplitz import toeplitz
from pallas_kernels.blocked_conv.hopper import CHUNK, REACH, ROWS

PITCH = CHUNK + 8
"""Elements per chunk in a shifted buffer: 8 rows of 144 bytes lie in 8 different groups of banks."""


def matrices(h: Array) -> Array:
    """[D, i, (l, j)] = h[64 l + i - j], the largest l first: M_l transposed, see `mosaic_gpu`."""
    return toeplitz(h, CHUNK, (REACH + 1) * CHUNK, REACH * CHUNK)


def block_of(lag: int) -> slice:
    """Where M_lag is among the columns of `matrices`."""
    return slice((REACH - lag) * CHUNK, (REACH - lag + 1) * CHUNK)


def read_shifted(buffer: Any, start: int) -> Array:
    """The tile that starts at chunk `start` of a buffer of pitch `PITCH`."""
    return plgpu.load(buffer.at[start : start + ROWS, :CHUNK], layout=plgpu.Layout.WGMMA, optimized=False)


def sum_of_products(left: Sequence[Array], right: Sequence[Any], interpret: bool) -> Array:
    """sum_l left_l @ right_l in fp32; left in registers, right in shared memory."""
    if interpret:  # The simulation knows no product whose left operand is in registers.
        products = [
            jnp.dot(a, b[...], preferred_element_type=jnp.float32) for a, b in zip(left, right, strict=True)
        ]
        return sum(products[1:], products[0])

    def accumulate(total: Any) -> Array:
        for a, b in zip(left, right, strict=True):
            plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((ROWS, CHUNK), jnp.float32))
