"""Convolution of long blocks by fp32 FFT, as short as the wanted outputs allow."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Complex, Float

from pallas_kernels._conv.gates import accumulator
from pallas_kernels._conv.packed import fit
from pallas_kernels._conv.toeplitz import window
from pallas_kernels.long_conv.groups import SPECTRUM_BYTES, fewest_groups


def fast_length(n: int) -> int:
    """Return the least even number >= n whose only prime factors are 2, 3 and 5."""
    best = 2 << (max(n, 2) - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            even = 2 * three
            while even < n:
                even *= 2
            best = min(best, even)
            three *= 3
        five *= 5
    return best


def _transform(op: Callable[[Array], Array], x: Array) -> Array:
    """Run op over the last axis: all rows in one call, except on CPUs one row per call.

    XLA's CPU runtime splits a batch of transforms over the very threads that run it, and waits for the parts. When
    as many transforms as there are threads are ready together, all wait and none works: the program hangs. Packed
    rows are such a program. A transform of a single row is not split.
    """

    def by_row(x: Array) -> Array:
        rows = lax.map(op, x.reshape(-1, x.shape[-1]))
        return rows.reshape(*x.shape[:-1], rows.shape[-1])

    return lax.platform_dependent(x, cpu=by_row, default=op)


def rfft(x: Float[Array, "*B T"], length: int) -> Complex[Array, "*B F"]:
    """Return the spectrum of x, filled up with zeros to `length`."""
    return _transform(partial(jnp.fft.rfft, n=length), x)


def irfft(spectrum: Complex[Array, "*B F"], length: int) -> Float[Array, "*B length"]:
    """Return the row of `length` steps with that spectrum."""
    return _transform(partial(jnp.fft.irfft, n=length), spectrum)


def fft_product(
    filter: Float[Array, "D F"],
    u: Float[Array, "B D N C"],
    *,
    rows: int,
    offset: int,
    spectrum_bytes: int = SPECTRUM_BYTES,
) -> Float[Array, "B D N rows"]:
    """Return y_i = sum_j filter[offset + i - j] u_j for i < rows, in each of N blocks.

    0 <= offset, in fp32 throughout. The transform may wrap around if what wraps falls on outputs that nobody wants. Its
    length is T + min(L, T) - 1 for a causal row of T, and 2s for two halves of size s.
    """
    (batch, channels, blocks, columns), taps = u.shape, filter.shape[1]
    behind = min(columns - 1, offset)
    ahead = min(rows - 1, taps - 1 - offset)
    length = fast_length(max(ahead + columns, rows + behind))
    h = window(filter, offset - behind, ahead + behind + 1)
    groups = fewest_groups(channels, 8 * batch * channels * blocks * length, spectrum_bytes)
    if groups == 1:
        return _convolve(h, u, length, behind, rows)
    per = channels // groups
    u = jnp.moveaxis(u.reshape(batch, groups, per, blocks, columns), 1, 0)
    y = lax.map(lambda hu: _convolve(*hu, length, behind, rows), (h.reshape(groups, per, -1), u))
    return jnp.moveaxis(y, 0, 1).reshape(batch, channels, blocks, rows)


@partial(jax.checkpoint, static_argnums=(2, 3, 4))
def _convolve(h: Array, u: Array, length: int, skip: int, rows: int) -> Array:
    """Return irfft(rfft(u) rfft(h)), outputs from `skip` on.

    It is rematerialised: spectra are twice as large as inputs.
    """
    wide = accumulator(u.dtype)
    spectrum = rfft(u.astype(wide), length) * rfft(h.astype(wide), length)[None, :, None]
    return fit(irfft(spectrum, length)[..., skip:], rows)
