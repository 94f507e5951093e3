"""What both Hopper kernels are made of: tiles read step by step, neighbouring steps in neighbouring threads."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

STAGES = 2
"""Tiles whose loads are under way or in use at a time."""

EDGE = 128
"""Steps kept of the tile walked through before: one a thread, the least that all of them move together."""


def one_by_one(*shape: int) -> Any:
    """Each thread of 128 has every 128th step: no two of a warp ask the same bank, whatever the shift."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def spread(chunks: Any) -> Array:
    """Chunks [chunk, step] of a tile, as one row of steps."""
    rows, steps = chunks.shape
    return plgpu.load(chunks, layout=one_by_one(rows, steps)).reshape(rows * steps)


def read_at(buffer: Any, starts: Iterable[int], steps: int) -> list[Array]:
    """As many steps of a buffer from each of `starts` on."""
    return [plgpu.load(buffer.at[start : start + steps], layout=one_by_one(steps)) for start in starts]


def sum_of_products(weights: Sequence[Array], arrays: Sequence[Array]) -> Array:
    """sum_k weights_k arrays_k."""
    products = [weight * z for weight, z in zip(weights, arrays, strict=True)]
    return sum(products[1:], products[0])
