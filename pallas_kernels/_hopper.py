"""What the convolutions' Hopper kernels share: rows as matrices [chunk, step], and how many of them a program takes.

Imports no GPU dialect.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 64
"""Steps of a chunk: 128 bytes of bf16, the width of a swizzled tile."""

PROGRAMS = 1056
"""Enough programs for four waves of two on each of an H200's 132 multiprocessors; rows beyond share a program."""


def as_chunks(z: Float[Array, "B D T"]) -> Float[Array, "R N 64"]:
    """R = B D rows as matrices [chunk, step], filled up with zeros to a multiple of 8 chunks."""
    batch, channels, length = z.shape
    chunks = -(-length // (8 * CHUNK)) * 8
    filled = jnp.pad(z, ((0, 0), (0, 0), (0, chunks * CHUNK - length)))
    return filled.reshape(batch * channels, chunks, CHUNK)


def as_rows(z: Float[Array, "R N 64"], shape: tuple[int, ...]) -> Float[Array, "B D T"]:
    """The inverse of `as_chunks`; `shape` is [B, D, T]."""
    return z.reshape(*shape[:2], -1)[..., : shape[2]]


def rows_per_program(batch: int, channels: int) -> int:
    """The most rows of one channel, a divisor of the batch, that leave `PROGRAMS` programs; else one."""
    return max(
        n for n in range(1, batch + 1) if (batch % n == 0 and channels * batch >= n * PROGRAMS) or n == 1
    )


def varying_like(x: Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result that differs between devices inside `shard_map` where x does; as many axes as x."""
    kind: Any = jax.typeof(x)
    return kind.update(shape=shape, dtype=jnp.dtype(dtype))
