"""The DFT of real rows as small dense products (Monarch), at the odd frequencies that need no padding.

A convolution modulo z^2M + 1 of rows of M real steps has no wrap-around in its first M outputs. Over the reals that
ring is the complex numbers modulo z^M - i, so a row of M real steps is known by its values at M points,

    U_k = sum_n u_n w^(n (4k - 1)),  w = exp(-2 pi i / 4M),  0 <= k < M:

half as many complex numbers as a transform of 2M real points has steps, and no two of them have to be combined. With
M = r_1 ... r_s, n = (n_1, ..., n_s) with n_1 slowest and k = k_1 + r_1 k_2 + ..., stage j sums over n_j with

    exp(-2 pi i n_j (4 (k_1 + ... + r_1 ... r_(j-1) k_j) - 1) / (4 r_1 ... r_j)) / sqrt(r_j).

Each (k_1, ..., k_(j-1)) has a matrix of its own, which holds the twiddle factors. Steps come first and rows last:
then a stage is one batched product of [2 r_j, 2 r_j] with [2 r_j, rest x rows], and nothing is ever transposed.

All stages are unitary. So restoring, Re(A^H S), is the transpose of transforming, A u, and undoes it.

Source: Monarch decompositions (Fu et al. 2023, arXiv:2311.05908, sec. 3.1); the weights that make a convolution
negacyclic (Crandall and Fagin 1994, sec. 3).
"""

import math
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from pallas_kernels._conv.gates import accumulator

SINGLE = 512
"""Rows up to this long may be one dense product."""

GRID = 8
"""Radices of rows longer than it are multiples of it: in fp16, of 16 bytes."""

TILE = 32
"""Products are tiled by 64, so a stage of radix r with its complex parts costs as much as the next multiple."""

LARGEST_RADIX = 512
LARGEST_LAST = (128, 32)
"""Largest last radix of two and of three stages: the last stage's matrices are 8 M r bytes in fp16."""

STAGE_FLOPS = 2600.0
"""The cost of a stage's reads and writes of a point, in FLOPs of an H200's tensor cores (16 bytes at 4 TB/s)."""


@lru_cache(maxsize=256)
def radices(points: int) -> tuple[int, ...]:
    """Return the cheapest stages whose product M is at least `points`."""
    if points <= GRID:
        return (points,)
    found = [*_one(points), *_two(points), *_three(points)]
    return min(found, key=lambda stages: (math.prod(stages) * _cost(stages), stages))


def _cost(stages: tuple[int, ...]) -> float:
    """Return a point's FLOPs.

    The first stage has real inputs there and real outputs back.
    """
    first, *rest = (-(-radix // TILE) * TILE for radix in stages)
    return 8.0 * first + 16.0 * sum(rest) + STAGE_FLOPS * len(stages)


def _one(points: int) -> list[tuple[int, ...]]:
    return [(_filling(points, 1),)] if points <= SINGLE else []


def _two(points: int) -> list[tuple[int, ...]]:
    found = ((first, _filling(points, first)) for first in range(GRID, LARGEST_RADIX + 1, GRID))
    return [stages for stages in found if stages[1] <= LARGEST_LAST[0]]


def _three(points: int) -> list[tuple[int, ...]]:
    found = []
    for last in range(GRID, LARGEST_LAST[1] + 1, GRID):
        for first in range(GRID, LARGEST_RADIX + 1, GRID):
            found.append((first, _filling(points, first * last), last))
    return found


def _filling(points: int, others: int) -> int:
    """Return the least radix that fills up `points` beside the others."""
    return -(-points // (others * GRID)) * GRID


def stage_matrices(stages: tuple[int, ...], dtype: Any) -> tuple[Float[Array, "P K N"], ...]:
    """Return the matrices of each stage as real blocks.

    They are [r_1 ... r_(j-1), 2 r_j (outputs), 2 r_j (inputs)]. Outputs have (re, im) behind their digit, inputs before
    it; the first stage has real inputs, [1, 2 r_1, r_1].
    """
    return tuple(stage_matrix(stages, index, dtype) for index in range(len(stages)))


def stage_matrix(stages: tuple[int, ...], index: int, dtype: Any) -> Float[Array, "P K N"]:
    """Return the matrix of one stage, for each frequency of those before it."""
    radix, before = stages[index], math.prod(stages[:index])
    frequency = jnp.zeros(1, jnp.uint32)
    for j in range(index + 1):
        digit = math.prod(stages[:j]) * jnp.arange(stages[j], dtype=jnp.uint32)
        frequency = (frequency[:, None] + digit[None]).reshape(-1)
    whole = 4 * before * radix
    quarter = (4 * frequency.reshape(before, radix, 1) + whole - 1) % whole
    cosine, sine = turned(quarter, radix, whole, dtype)
    real = jnp.stack([cosine, -sine], axis=2)
    if index:
        real = jnp.stack([real, jnp.stack([sine, cosine], axis=2)], axis=3)
    return real.reshape(before, 2 * radix, -1)


def turned(
    frequency: UInt[Array, "P R 1"], radix: int, whole: int, dtype: Any
) -> tuple[Float[Array, "P R R"], Float[Array, "P R R"]]:
    """Return cosine and sine of 2 pi frequency n / whole for n < radix, over sqrt(radix).

    Phases are exact integers.
    """
    phase = (frequency * jnp.arange(radix, dtype=jnp.uint32)[None, None]) % whole
    wide = accumulator(dtype)
    # Centre the phase: the angle is then rounded in units of its own size.
    centred = phase.astype(jnp.int32)
    centred = jnp.where(2 * centred > whole, centred - whole, centred)
    angle = centred.astype(wide) * jnp.asarray(2 * math.pi / whole, wide)
    scale = jnp.asarray(radix**-0.5, wide)
    return (jnp.cos(angle) * scale).astype(dtype), (jnp.sin(angle) * scale).astype(dtype)


def transform(matrices: tuple[Array, ...], u: Float[Array, "M R"]) -> Float[Array, "M 2 R"]:
    """Return A u of every column, real and imaginary part, in the matrices' dtype."""
    rows, z = u.shape[-1], u
    for matrix in matrices:
        z = stage_product("pkn,pnr->pkr", matrix, z.reshape(matrix.shape[0], matrix.shape[2], -1))
    return z.reshape(-1, 2, rows)


def restore(matrices: tuple[Array, ...], spectrum: Float[Array, "M 2 R"]) -> Float[Array, "M R"]:
    """Return Re(A^H S) of every column, in the matrices' dtype."""
    rows, z = spectrum.shape[-1], spectrum
    for matrix in reversed(matrices):
        z = stage_product("pkn,pkr->pnr", matrix, z.reshape(matrix.shape[0], matrix.shape[1], -1))
    return z.reshape(-1, rows)


def stage_product(equation: str, matrix: Array, z: Array) -> Array:
    """Multiply with sums in fp32 or wider, rounded once to the operands' dtype."""
    wide = accumulator(matrix.dtype)
    exact = lax.Precision.HIGHEST if matrix.dtype == wide else lax.Precision.DEFAULT
    return jnp.einsum(equation, matrix, z, precision=exact, preferred_element_type=matrix.dtype)


def power_of_two(largest: Float[Array, "..."], bits: int) -> Float[Array, "..."]:
    """Return the power of two that takes `largest` to 2^(bits - 1) up to 2^bits; 1 for zero.

    2^bits itself is not reached.
    """
    _, exponent = jnp.frexp(largest)
    shift = jnp.clip(bits - exponent, -LARGEST_SHIFT, LARGEST_SHIFT)
    return jnp.ldexp(jnp.ones_like(largest), jnp.where(largest > 0, shift, 0))


LARGEST_SHIFT = 120
"""Keeps the scale and its inverse within fp32."""
