"""Weights that the Hopper kernels make themselves, where programs take few tiles: all but T, of 32 numbers a channel.

XLA would make them in several kernels and 16 KB a channel, which each program reads.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import CHUNK
from pallas_kernels.modal_conv.hopper import MODES

SHAPE = (CHUNK, CHUNK)


def rates(*vectors: Float[Array, "D 16"]) -> Float[Array, "D N 64"]:
    """Return log_poles and residues as the kernels take them.

    They are a number for each column, or each row, of four matrices.
    """
    return jnp.tile(jnp.stack(vectors, 1), (1, 1, CHUNK // MODES))


def reading(rates: Any, dtype: Any, *, reverse: bool) -> Array:
    """Return R of the upper and lower bits, each twice, as a tile [step, (half, copy, mode)]."""
    step = _iota(0)
    weights = _by_column(rates.at[1]) * jnp.exp(
        (CHUNK - step if reverse else step + 1) * _by_column(rates.at[0])
    )
    return _halves(weights, _iota(1) < 2 * MODES, dtype)


def writing(rates: Any, dtype: Any, *, reverse: bool) -> Array:
    """Return K of the upper and lower bits as 32 rows of a tile [(half, mode), step]."""
    step = _iota(1)
    weights = jnp.exp((step if reverse else CHUNK - 1 - step) * _by_row(rates.at[0]))
    return _halves(weights, _iota(0) < MODES, dtype)


def writing_with_lags(rates: Any, dtype: Any) -> Array:
    """Return K and K' of `mosaic_gpu_vjp` so: a tile [(matrix, half, mode), step]."""
    row, step = _iota(0), _iota(1) + 1
    weights = jnp.exp(step * _by_row(rates.at[0]))
    weights = jnp.where(row < 2 * MODES, weights, weights * (step * (1 / CHUNK)))
    return _halves(weights, (row < MODES) | ((row >= 2 * MODES) & (row < 3 * MODES)), dtype)


def decays(rates: Any, distances: Sequence[int]) -> dict[int, Array]:
    """Return a^k for some distances in chunks, one number per mode, in registers."""
    ref = rates.at[0, :MODES]
    log_poles = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return {k: jnp.exp(CHUNK * k * log_poles) for k in distances}


def _iota(axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, SHAPE, axis, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _by_row(ref: Any) -> Array:
    loaded = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(loaded, SHAPE, (0,))


def _by_column(ref: Any) -> Array:
    loaded = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(loaded, SHAPE, (1,))


def _halves(z: Array, upper: Array, dtype: Any) -> Array:
    """Return the upper 16 bits of z where asked for, elsewhere the rest."""
    bits = lax.bitcast_convert_type(z, jnp.int32)
    high = lax.bitcast_convert_type(bits & jnp.int32(-65536), z.dtype)
    return jnp.where(upper, high, z - high).astype(dtype)
