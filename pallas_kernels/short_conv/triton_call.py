"""Parts of both Triton kernels' calls: a program per tile of a row, and groups of rows under vmap."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._dispatch import current_device
from pallas_kernels.short_conv.triton_reach import reach


def tiles_of(length: int, pairs: int) -> int:
    """Count programs a row."""
    return -(-length // (2 * pairs))


def pairs_of(length: int, most: int) -> int:
    """Return pairs of steps per program: `most`, fewer in rows that are shorter."""
    return min(most, 1 << (-(-length // 2) - 1).bit_length())


def call_over_rows(
    kernel: Any,
    arrays: tuple[Array, Array, *tuple[Array | None, ...]],
    *more: Array,
    out_shape: Any,
    pairs: int,
    warps: int,
) -> Any:
    """Run the kernel on x [G, B, D, T], weights [G, D, K], gates, history and segment_ids.

    Each of the latter may be None. What is None is not read, and x stands in its place. `more` are inputs behind those.
    """
    import jax_triton

    x, weights, pre_gate, post_gate, history, segment_ids = arrays
    bits = None if segment_ids is None else reach(segment_ids, weights.shape[-1], history=history is not None)
    _, batch, channels, length = x.shape
    major, minor = current_device().capability or (8, 0)
    return jax_triton.triton_call(
        *(x if z is None else z for z in (*arrays[:-1], bits)),
        *more,
        kernel=kernel,
        out_shape=out_shape,
        grid=(x.size // length * tiles_of(length, pairs),),
        name=kernel.__name__,
        num_warps=warps,
        compute_capability=10 * major + minor,
        BATCH=batch,
        CHANNELS=channels,
        LENGTH=length,
        TAPS=weights.shape[-1],
        PAIRS=pairs,
        PRE=pre_gate is not None,
        POST=post_gate is not None,
        HISTORY=history is not None,
        PACKED=segment_ids is not None,
    )


def join_groups(size: int, batched: Sequence[Any], arrays: Sequence[Array | None]) -> list[Array | None]:
    """Join arrays of `size` times as many groups, from arguments of a `custom_vmap` rule."""

    def join(z: Array, is_batched: bool) -> Array:
        z = z if is_batched else jnp.broadcast_to(z, (size, *z.shape))
        return z.reshape(-1, *z.shape[2:])

    return [None if z is None else join(z, b) for z, b in zip(arrays, batched, strict=True)]


def split_groups(size: int, z: Array) -> Array:
    """Split outputs of `size` times as many groups, with the axis of a `custom_vmap` in front."""
    return z.reshape(size, -1, *z.shape[1:])
