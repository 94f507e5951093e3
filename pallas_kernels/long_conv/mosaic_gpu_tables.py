"""Matrices, twiddles and weights of the Hopper kernel, and the taps' spectrum as it reads it.

With w = exp(-2 pi i / 4M), M = 4096 C, a step n = 4096 m + 64 n_1 + n_2 and a frequency k = j + C (k_1 + 64 k_2),

    w^(n (4k - 1)) = turn_j[m, n_1] F[n_1, k_1] twiddle_j[k_1, n_2] F[n_2, k_2],    F[a, b] = exp(-2 pi i a b / 64)
    turn_j[m, n_1] = w^((4096 m + 64 n_1) (4j - 1)),
    twiddle_j[k_1, n_2] = w^(n_2 (4 (j + C k_1) - 1)) = twiddle_0[k_1, n_2] shift_j[n_2].

So the C classes j are transforms of 4,096 complex points each, all by one matrix F. Rows that share a tile have
M = 64 R, R = 64 / rows: n_1 and k_1 are smaller than R, and the first F is R x R, a block for each row.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels._hopper import CHUNK, ROWS
from pallas_kernels.long_conv.dft import stage_matrices
from pallas_kernels.long_conv.hopper import LONG_CLASSES, Ring
from pallas_kernels.long_conv.monarch_vjp import Form, Plan


class Tables(NamedTuple):
    """The same for all channels.

    Attributes:
      matrices: -Im F, Re F and Im F over 8 side by side, in fp16; where rows share tiles, behind the first stage's.
      twiddles: real and imaginary parts, class after class, in fp16; only of class 0 where there are shifts.
      turns: those of each class and tile m, over sqrt(C), in fp16.
      shifts: those of each class, in fp32, or None.
    """

    matrices: Any
    twiddles: Any
    turns: Any
    shifts: Any


@lru_cache(maxsize=16)
def tables(ring: Ring) -> Tables:
    """Return tables of rows of a ring, from phases that are whole numbers."""
    classes, height, whole = ring.classes, ring.height, 4 * ring.points
    j, row, step = np.arange(classes)[:, None], np.arange(ROWS) % height, np.arange(CHUNK)
    twiddled = j[:1] if ring.shifts else j
    twiddles = _turned((4 * (twiddled[:, None] + classes * row[:, None]) - 1) * step, whole)
    start = height * CHUNK * np.arange(classes)
    turns = _turned((start[:, None] + CHUNK * row) * (4 * j[:, None] - 1), whole) / classes**0.5
    last = dft_parts(CHUNK)
    return Tables(
        np.stack([last] if ring.together == 1 else [dft_parts(height), last]).astype(np.float16),
        np.moveaxis(twiddles, 0, 1).reshape(-1, ROWS, CHUNK).astype(np.float16),
        np.moveaxis(turns, 0, 2).reshape(-1, ROWS).astype(np.float16),
        np.moveaxis(_turned(4 * j * step, whole), 0, 1).reshape(-1, CHUNK).astype(np.float32)
        if ring.shifts
        else None,
    )


@lru_cache(maxsize=16)
def tables_of_long_rows(ring: Ring) -> tuple[Any, ...]:
    """Return matrix, twiddles, shifts as in `tables`, and turns; in fp32.

    Turns are of tile 0 and, times them, of tile m, [C, C, 2].
    """
    classes, whole = ring.classes, 4 * ring.points
    j, step = np.arange(classes)[:, None], np.arange(CHUNK)
    turns = _turned(CHUNK * np.arange(ROWS) * (4 * j - 1), whole) / classes**0.5
    shifts, roots = _turned(4 * j * step, whole), _turned((4 * j - 1) * np.arange(classes), 4 * classes)
    return (
        dft_parts(CHUNK)[None].astype(np.float16),
        _turned((4 * classes * np.arange(ROWS)[:, None] - 1) * step, whole).astype(np.float16),
        *(np.moveaxis(z, 0, 1).reshape(-1, CHUNK).astype(np.float32) for z in (shifts, turns)),
        # Fill up to whole blocks of 512 bytes: the copy engine's share of each of 128 threads.
        np.resize(np.moveaxis(roots, 0, 2), 2 * LONG_CLASSES**2).astype(np.float32),
    )


def _turned(phase: Any, whole: int) -> Any:
    """Return exp(-2 pi i phase / whole), real and imaginary part first."""
    angle = 2 * np.pi * (phase % whole) / whole
    return np.stack([np.cos(angle), -np.sin(angle)])


def dft_parts(size: int) -> Any:
    """Return -Im F, Re F, Im F side by side, unitary.

    They are of blocks of `size` along the diagonal.
    """
    real, imaginary = _turned(np.outer(np.arange(size), np.arange(size)), size) / size**0.5
    blocks = np.eye(ROWS // size)
    return np.concatenate([np.kron(blocks, part) for part in (-imaginary, real, imaginary)], axis=1)


def spectrum(
    form: Form, ring: Ring, filter: Float[Array, "D F"], bias: Float[Array, "D"] | None
) -> tuple[Float[Array, "D P 64 64"], Float[Array, "D 64"]]:
    """Return each channel's H in fp16, as the kernel reads it, and one over its scale, 64 times."""
    found = _plan(form, ring).response(filter, bias)
    channels = filter.shape[0]
    parts = found.values.reshape(ring.classes, ring.height, CHUNK, 2, channels)
    tiles = jnp.transpose(parts.astype(jnp.float16), (4, 0, 3, 1, 2))
    tiles = jnp.tile(tiles, (1, 1, 1, ring.together, 1)).reshape(channels, -1, ROWS, CHUNK)
    inverse = jnp.broadcast_to(1 / found.scale.reshape(channels, 1), (channels, CHUNK))
    return tiles, inverse


def taps_gradient(
    form: Form, ring: Ring, sums: Float[Array, "D N P 64 64"], filter: Float[Array, "D F"]
) -> Float[Array, "D F"]:
    """Return the taps' gradient by the adjoint of `spectrum`.

    `sums` is conj(U) V of each channel in the kernel's order, in N parts.
    """
    channels, *_, chunk = sums.shape
    parts = sums.reshape(channels, -1, ring.classes, 2, ring.together, ring.height, chunk).sum((1, 4))
    real, imaginary = (parts[:, :, i].reshape(channels, -1).T for i in range(2))
    return _plan(form, ring).adjoint_response(real, imaginary, filter)


def _plan(form: Form, ring: Ring) -> Plan:
    return Plan(form, 1, ring.points, jnp.float32, stage_matrices(ring.stages, jnp.float16))
