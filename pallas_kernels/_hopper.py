"""Parts that Hopper kernels share: where they run; for convolutions rows as matrices [chunk, step], and rows a program.

Imports no GPU dialect.
"""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._dispatch import Device

CHUNK = 64
"""Steps of a chunk: 128 bytes of bf16, the width of a swizzled tile."""

ROWS = 64
"""Chunks per tile: the rows of a warpgroup's matrix product."""

BOX = 8 * CHUNK
"""Steps of the smallest box that the copy engine moves of a row cut off from its neighbours."""

MOST_BLOCKS = 65_535
"""Programs along an axis of a kernel's grid, except its last, which may have 2^31 - 1: CUDA's limit of y and z."""

PROGRAMS = 1056
"""Enough programs for four waves of two on each of an H200's 132 multiprocessors; rows beyond share a program."""


def why_not_on(device: Device) -> str | None:
    """Return why no kernel for Hopper runs on this device, or None."""
    if device.platform != "gpu" or device.capability != (9, 0):
        return f"it is compiled for compute capability 9.0 exactly (H100, H200), this is {device.kind}"
    return None


def why_not_triton_on(device: Device) -> str | None:
    """Return why no kernel of ours in Pallas' Triton runs on this device, or None."""
    if (reason := why_not_on(device)) is not None:
        return reason
    if find_spec("jax.experimental.pallas.triton") is None:
        return "this JAX has no Pallas backend for Triton any more (0.11 announces that it goes)"
    return None


def why_not_streams(device: Device, *streams: Any) -> str | None:
    """Return why no kernel for Hopper takes these streams on this device, or None.

    A stream that is not given is None.
    """
    if (reason := why_not_on(device)) is not None:
        return reason
    dtypes = {str(z.dtype) for z in streams if z is not None}
    if dtypes != {"bfloat16"}:
        return f"it takes bf16 streams, these are {', '.join(sorted(dtypes))}"
    return None


def is_in_whole_boxes(length: int) -> bool:
    """Return whether rows of this length are matrices of chunks as they lie in memory."""
    return length % BOX == 0


def as_chunks(z: Float[Array, "B D T"]) -> Float[Array, "R N 64"]:
    """Cut R = B D rows into matrices [chunk, step].

    They are filled up with zeros to a multiple of 8 chunks.
    """
    batch, channels, length = z.shape
    chunks = -(-length // (8 * CHUNK)) * 8
    filled = jnp.pad(z, ((0, 0), (0, 0), (0, chunks * CHUNK - length)))
    return filled.reshape(batch * channels, chunks, CHUNK)


def as_rows(z: Float[Array, "R N 64"], shape: tuple[int, ...]) -> Float[Array, "B D T"]:
    """Undo `as_chunks`; `shape` is [B, D, T]."""
    return z.reshape(*shape[:2], -1)[..., : shape[2]]


def rows_per_program(batch: int, channels: int, *, fewer: int = 1) -> int:
    """Return the most rows of a channel, dividing the batch, that leave `PROGRAMS` programs.

    If none does it is one. Programs may be as many times fewer as asked, where waves weigh less than what each reads
    and writes besides.
    """
    return max(
        n
        for n in range(1, batch + 1)
        if (batch % n == 0 and fewer * channels * batch >= n * PROGRAMS) or n == 1
    )


def varying_like(x: Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of a result that differs inside `shard_map` where x does.

    It has as many axes as x.
    """
    kind: Any = jax.typeof(x)
    return kind.update(shape=shape, dtype=jnp.dtype(dtype))
