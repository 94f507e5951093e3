"""Channels in groups, so that spectra, which are twice as large as their inputs, stay within a limit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels._compat import is_symbolic, vary_alike

Arrays = tuple[Any, ...]

SPECTRUM_BYTES = 2**31
"""Above this size of the inputs' spectrum, channels are convolved group after group."""


def fewest_groups(channels: int, size: int, limit: int) -> int:
    """Return the fewest equal groups of channels that keep each share of `size` in the limit.

    A size that an open number of rows makes symbolic is taken to fit.
    """
    if is_symbolic(size):
        return 1
    fits = (n for n in range(1, channels + 1) if channels % n == 0 and size <= n * limit)
    return next(fits, channels)


def by_groups(groups: int, work: Callable[[Arrays], Arrays], arrays: Arrays, like: Arrays) -> Arrays:
    """Run `work` on one group of channels after another.

    Its results are written into arrays of the shapes of `like`.
    """
    if groups == 1:
        return work(arrays)
    channels = arrays[0].shape[0]
    per = channels // groups

    def part(z: Any, first: Array) -> Any:
        if z is None or z.shape[_axis(z)] == 1:
            return z
        return lax.dynamic_slice_in_dim(z, first, per, _axis(z))

    def step(index: Array, found: Arrays) -> Arrays:
        first = index * per
        results = work(tuple(part(z, first) for z in arrays))
        return jax.tree.map(
            lambda whole, own: lax.dynamic_update_slice_in_dim(whole, own, first, _axis(own)), found, results
        )

    empty = jax.tree.map(lambda z: vary_alike(jnp.zeros(z.shape, z.dtype), *arrays)[0], like)
    return lax.fori_loop(0, groups, step, empty)


def _axis(z: Array) -> int:
    """Return the axis of channels: taps are [D, F], a bias [D], streams [B, D, N, C]."""
    return 0 if z.ndim <= 2 else 1
