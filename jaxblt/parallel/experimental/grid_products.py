"""Matrix products over a grid of devices: in 2, 2.5 and 3 dimensions.

A grid has q rows, q columns and a depth. On each device lies a part of both factors:

| product | devices | share of each factor | exchanged |
|---|---|---|---|
| `grid_product`, depth 1 (2 dimensions) | q^2 | 1 / q^2 | q permutes of each factor |
| `grid_product`, depth c (2.5 dimensions) | q^2 c | 1 / q^2 | q / c permutes of each factor, one sum |
| `cube_product` (3 dimensions) | q^3 | 1 / q^3 | one gather of each factor, one scattered sum |

A depth trades memory for exchanges: each layer of the grid makes its own part of the sum over inner blocks.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float

GRID = ("row", "column", "depth")
"""The axes of a grid."""
BLOCKS = PartitionSpec("row", "column")
"""The place of both factors and of the product of `grid_product`."""
CUBE_LEFT = PartitionSpec(("row", "column"), "depth")
CUBE_RIGHT = PartitionSpec(("depth", "row"), "column")
CUBE_PRODUCT = PartitionSpec(("row", "depth"), "column")
"""The places of the left factor, the right one and the product of `cube_product`.

Column and depth change places from the left factor to the product: the next layer's grid has these axes swapped.
"""

Pairs = list[tuple[int, int]]


def make_grid(side: int, depth: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of `side` rows, `side` columns and `depth` layers; a cube if `depth` is `side`.

    Raises:
      ValueError: the depth does not divide the side, or there are too few devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = side * side * depth
    if side < 1 or depth < 1 or side % depth:
        raise ValueError(
            f"a grid of side {side} and depth {depth}: the depth is at least 1 and divides the side"
        )
    if len(devices) < count:
        raise ValueError(
            f"a grid of {side} x {side} x {depth} takes {count} devices, there are {len(devices)}"
        )
    return jax.make_mesh((side, side, depth), GRID, devices=devices[:count], axis_types=(AxisType.Auto,) * 3)


def grid_product(a: Float[Array, "M K"], b: Float[Array, "K N"], *, mesh: Mesh) -> Float[Array, "M N"]:
    """Return a @ b over a grid in 2 or, with a depth above 1, in 2.5 dimensions.

    Device (i, j, d) begins with the blocks A[i, k] and B[k, j], k = i + j + d q/c, and moves on to k + 1 with each
    permute. After q/c products the layers' sums are added up.

    Sources: Cannon (1969), "A cellular computer to implement the Kalman filter algorithm"; Solomonik and Demmel,
    "Communication-optimal parallel 2.5D matrix multiplication", Euro-Par 2011.

    Raises:
      ValueError: a size does not divide among rows and columns.
    """
    side, depth = mesh.shape["row"], mesh.shape["depth"]
    _check_divides("grid_product", side, a, b)
    # Leave a depth of 1 out: XLA keeps a sum over one device as an exchange.
    axes = GRID if depth > 1 else GRID[:2]

    def local(a: Array, b: Array) -> Array:
        left, right = skews(side, depth)
        a, b = lax.ppermute(a, axes, left), lax.ppermute(b, axes, right)
        total = _product(a, b)
        for _ in range(side // depth - 1):
            a, b = lax.ppermute(a, "column", shift(side)), lax.ppermute(b, "row", shift(side))
            total += _product(a, b)
        return (lax.psum(total, "depth") if depth > 1 else total).astype(a.dtype)

    return jax.shard_map(local, mesh=mesh, in_specs=(BLOCKS, BLOCKS), out_specs=BLOCKS)(a, b)


def cube_product(a: Float[Array, "M K"], b: Float[Array, "K N"], *, mesh: Mesh) -> Float[Array, "M N"]:
    """Return a @ b over a cube: device (i, j, k) multiplies A[i, k] by B[k, j], and the sum over k is scattered.

    Both factors and the product are split over all devices, see `CUBE_LEFT`. A block is gathered just before it is
    used.

    Source: Agarwal, Balle, Gustavson, Joshi and Palkar, "A three-dimensional approach to parallel matrix
    multiplication", IBM J. Res. Dev. 39 (1995).

    Raises:
      ValueError: a size does not divide among the devices along it.
    """
    _check_divides("cube_product", mesh.shape["row"] ** 2, a, b)

    def local(a: Array, b: Array) -> Array:
        a = lax.all_gather(a, "column", tiled=True)
        b = lax.all_gather(b, "row", tiled=True)
        return lax.psum_scatter(_product(a, b), "depth", tiled=True).astype(a.dtype)

    return jax.shard_map(local, mesh=mesh, in_specs=(CUBE_LEFT, CUBE_RIGHT), out_specs=CUBE_PRODUCT)(a, b)


def skews(side: int, depth: int) -> tuple[Pairs, Pairs]:
    """Return from which device to which the first blocks of both factors go.

    Devices are counted along rows, then columns, then depth.
    """
    place = lambda i, j, d: (i * side + j) * depth + d  # noqa: E731
    devices = [(i, j, d) for i in range(side) for j in range(side) for d in range(depth)]
    inner = {(i, j, d): (i + j + d * (side // depth)) % side for i, j, d in devices}
    left = [(place(i, inner[i, j, d], d), place(i, j, d)) for i, j, d in devices]
    right = [(place(inner[i, j, d], j, d), place(i, j, d)) for i, j, d in devices]
    return left, right


def shift(side: int) -> Pairs:
    """Return the permute after which a device has the next block along an axis."""
    return [((i + 1) % side, i) for i in range(side)]


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _check_divides(name: str, parts: int, a: Array, b: Array) -> None:
    if any(size % parts for size in (*a.shape, *b.shape)):
        raise ValueError(
            f"{name}: {a.shape} and {b.shape} do not divide into {parts} parts along each axis: pad them"
        )
