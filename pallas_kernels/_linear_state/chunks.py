"""Time cut into chunks: [B, T, H, ...] as [N, B, H, C, ...], chunks first for a scan over them."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def fit_chunk(length: int, chunk_size: int) -> int:
    """Return steps of a chunk: `chunk_size`, or the power of two that a shorter row fits in."""
    return min(chunk_size, 1 << (length - 1).bit_length())


def missing(length: int, chunk: int) -> int:
    """Return the positions that fill the last chunk.

    Their form is one that JAX can divide if the length is symbolic.
    """
    return -(-length // chunk) * chunk - length


def into_chunks(x: Shaped[Array, "B T H ..."], chunk: int) -> Shaped[Array, "N B H C ..."]:
    """Cut x into chunks and heads, zeros behind the last step."""
    batch, length, heads, *rest = x.shape
    x = jnp.pad(x, ((0, 0), (0, missing(length, chunk)), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(batch, -1, chunk, heads, *rest)
    return jnp.transpose(x, (1, 0, 3, 2, *range(4, x.ndim)))


def out_of_chunks(y: Shaped[Array, "N B H C ..."], length: int) -> Shaped[Array, "B T H ..."]:
    """Undo `into_chunks` for rows of `length` steps."""
    count, batch, heads, chunk, *rest = y.shape
    y = jnp.transpose(y, (1, 0, 3, 2, *range(4, y.ndim)))
    return y.reshape(batch, count * chunk, heads, *rest)[:, :length]


def numbers_into_chunks(numbers: Int[Array, "B T"], chunk: int) -> Int[Array, "N B C"]:
    """Cut numbers of documents into chunks; steps behind the last one are of its document."""
    numbers = jnp.pad(numbers, ((0, 0), (0, missing(numbers.shape[1], chunk))), mode="edge")
    return jnp.moveaxis(numbers.reshape(numbers.shape[0], -1, chunk), 1, 0)
