"""Hopper: rows above 32,768 steps, which do not fit on chip. XLA takes them apart, a kernel does the rest.

A row of M = 4096 C points is C tiles of 4,096 steps, n = 4096 m + n'. As in `mosaic_gpu_tables`, frequencies of class j
are a transform of 4,096 points of their own,

    U_j[n'] = w^(n' (4j - 1)) G_j[n'],    G_j[n'] = sum_m E[j, m] u[4096 m + n'],
    E[j, m] = w^(4096 m (4j - 1)) / sqrt(C) = exp(-2 pi i m (4j - 1) / 4C) / sqrt(C),

so G of all classes is one matrix product, as only E mixes tiles, and y is another, by the transpose. The factor in
front of G is in the kernel's tables (`mosaic_gpu_classes`). Operands are fp16, sums fp32, and all stages unitary: no
number is larger than its row's norm.

Taps are scaled so that their sizes add up to at most 2^14, which bounds their spectrum before it is known.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._conv.gates import add_skip
from pallas_kernels._conv.packed import fit
from pallas_kernels._conv.toeplitz import window
from pallas_kernels._hopper import CHUNK, ROWS
from pallas_kernels.long_conv.dft import power_of_two, stage_matrix, stage_product
from pallas_kernels.long_conv.groups import Arrays, by_groups, fewest_groups
from pallas_kernels.long_conv.hopper import TILE
from pallas_kernels.long_conv.monarch_vjp import LARGEST_NORM, Form
from pallas_kernels.long_conv.mosaic_gpu_classes import convolve_classes
from pallas_kernels.long_conv.mosaic_gpu_classes_backward import differentiate_classes

GROUP_BYTES = 2**32 - 1
"""Channels go group after group if spectra of all rows are larger: no array has 2^31 numbers."""

GRID = 8
"""Classes of a row are a multiple of it: in fp16, of 16 bytes."""


def classes_of(length: int) -> int:
    """Return the fewest classes of rows of so many steps."""
    return -(-length // (TILE * GRID)) * GRID


def convolve_by_classes(form: Form, classes: int, arrays: Arrays, **options: Any) -> Float[Array, "B D T"]:
    """Return y of filter, bias, x, pre_gate and post_gate, in x's dtype.

    `options` are those of `convolve_classes`.
    """
    x = arrays[2]
    outer = Outer.of(form, classes)

    def work(group: Arrays) -> Arrays:
        filter, bias, x, pre, post = group
        taps, u = outer.taps(filter, bias), outer.rows(_product(x, pre))
        y = outer.restored(convolve_classes(taps.tiles, u.tiles, **options), x.shape[2])
        convolved = y * (taps.inverse * u.inverse)[..., None]
        return (_product(convolved, post).astype(form.dtype),)

    return by_groups(outer.groups(x), work, arrays, (jax.ShapeDtypeStruct(x.shape, form.dtype),))[0]


def differentiate_by_classes(form: Form, classes: int, arrays: Arrays, g: Array, **options: Any) -> Arrays:
    """Return gradients of filter, bias, x, pre_gate and post_gate from y's cotangent.

    They are None for what is not given.
    """
    outer, length = Outer.of(form, classes), g.shape[2]

    def work(group: Arrays) -> Arrays:
        filter, bias, x, pre, post, g = group
        u, v = _product(x, pre), _product(g, post)
        taps, sent, got = outer.taps(filter, bias), outer.rows(u), outer.rows(v)
        scale = power_of_two(length * jnp.sum(sent.largest * got.largest, axis=0), LARGEST_NORM)
        weights = scale[None] * sent.inverse * got.inverse
        streams, gated = (taps.tiles, sent.tiles, got.tiles, weights), post is not None
        found = differentiate_classes(*streams, gated=gated, **options)
        du = outer.restored(found.du, length) * (taps.inverse * got.inverse)[..., None]
        dpost = None
        if found.y is not None:
            y = outer.restored(found.y, length) * (taps.inverse * sent.inverse)[..., None]
            dpost = _product(g, y).astype(post.dtype)
        # Sum the bias's gradient apart: as a tap's gradient it would have the error of all taps.
        dbias = None if bias is None else jnp.sum(u * v, axis=(0, 2)).astype(bias.dtype)
        dpre = None if pre is None else _product(x, du).astype(pre.dtype)
        dtaps = outer.gradient_of_taps(found.taps, scale, filter)
        return dtaps, dbias, _product(du, pre).astype(x.dtype), dpre, dpost

    like = jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), arrays)
    return by_groups(outer.groups(g), work, (*arrays, g), like)


class Tiles(NamedTuple):
    """G of rows [2 C, B, D, 64, 64] or of taps [2 C, D, 64, 64], one over their scale [B, D] or [1, D].

    `largest` is what bounded it: rows' largest number, the sum of taps' sizes.
    """

    tiles: Array
    inverse: Array
    largest: Array


class Outer(NamedTuple):
    """The transforms around the kernel, of rows of C tiles and of taps; E as real numbers [2 C, C]."""

    form: Form
    classes: int
    matrix: Float[Array, "K N"]

    @classmethod
    def of(cls, form: Form, classes: int) -> "Outer":
        return cls(form, classes, stage_matrix((classes,), 0, jnp.float16)[0])

    @property
    def points(self) -> int:
        return self.classes * TILE

    def groups(self, x: Float[Array, "B D T"]) -> int:
        """Count groups of channels, so that spectra are not too large."""
        return fewest_groups(x.shape[1], 4 * self.points * x.shape[0] * x.shape[1], GROUP_BYTES)

    def rows(self, u: Float[Array, "B D T"]) -> Tiles:
        """Return G of rows in fp32."""
        bits = LARGEST_NORM - math.ceil(math.log2(self.points) / 2)
        largest = jnp.max(jnp.abs(u), axis=-1)
        scale = power_of_two(largest, bits)
        tiles = jnp.transpose(self._tiles(u * scale[..., None]), (2, 0, 1, 3))
        return Tiles(_transformed(self.matrix, tiles), 1 / scale, largest)

    def taps(self, filter: Float[Array, "D F"], bias: Float[Array, "D"] | None) -> Tiles:
        """Return G of taps, those of negative lags times -i, as `monarch_vjp` has it.

        The inverse is of H's scale.
        """
        sides = self._sides(add_skip(filter, bias, self.form.offset))
        largest = jnp.sum(jnp.abs(sides), axis=(0, 2))
        scale = power_of_two(largest, LARGEST_NORM)
        tiles = jnp.transpose(self._tiles(sides * scale[None, :, None]), (0, 2, 1, 3))
        found = _transformed(self._matrix_of_taps(), tiles.reshape(-1, *tiles.shape[2:]))
        return Tiles(found, 2.0**LARGEST_NORM / scale[None], largest[None])

    def restored(self, tiles: Float[Array, "P B D 64 64"], length: int) -> Float[Array, "B D T"]:
        """Return the first steps of rows of V, in fp32, scaled."""
        rows = jnp.transpose(_restored(self.matrix, tiles), (1, 2, 0, 3))
        return rows.reshape(*rows.shape[:2], self.points)[..., :length].astype(jnp.float32)

    def gradient_of_taps(
        self, tiles: Float[Array, "P D 64 64"], scale: Float[Array, "D"], filter: Float[Array, "D F"]
    ) -> Float[Array, "D F"]:
        """Return the adjoint of `taps`, from sums over rows.

        The sums are `scale` times what they stand for.
        """
        _, adjoint = jax.vjp(self._sides, filter)
        sides = _restored(self._matrix_of_taps(), tiles).reshape(-1, self.classes, filter.shape[0], TILE)
        sides = jnp.transpose(sides, (0, 2, 1, 3)).reshape(-1, filter.shape[0], self.points)
        return adjoint(sides.astype(jnp.float32) * (math.sqrt(self.points) / scale)[None, :, None])[0]

    def _sides(self, filter: Float[Array, "D F"]) -> Float[Array, "S D M"]:
        """Return taps from lag 0 on, and those of negative lags where there are any."""
        starts = (0, self.points) if self.form.offset else (0,)
        return jnp.stack([window(filter, self.form.offset - start, self.points) for start in starts])

    def _matrix_of_taps(self) -> Float[Array, "K N"]:
        """Return E, beside it -i E where there are negative lags."""
        if not self.form.offset:
            return self.matrix
        real, imaginary = jnp.moveaxis(self.matrix.reshape(self.classes, 2, self.classes), 1, 0)
        behind = jnp.stack([imaginary, -real], axis=1).reshape(self.matrix.shape)
        return jnp.concatenate([self.matrix, behind], axis=1)

    def _tiles(self, z: Float[Array, "A D T"]) -> Float[Array, "A D C N"]:
        return fit(z.astype(jnp.float16), self.points).reshape(*z.shape[:2], self.classes, TILE)


def _transformed(
    matrix: Float[Array, "K N"], tiles: Float[Array, "N ... 4096"]
) -> Float[Array, "K ... 64 64"]:
    """Multiply the matrix by tiles, of which each number is a column."""
    found = stage_product("kn,nr->kr", matrix, tiles.reshape(tiles.shape[0], -1))
    return found.reshape(matrix.shape[0], *tiles.shape[1:-1], ROWS, CHUNK)


def _restored(matrix: Float[Array, "K N"], tiles: Float[Array, "K ... 64 64"]) -> Float[Array, "N ... 4096"]:
    """Multiply the transpose of the matrix by tiles."""
    found = stage_product("kn,kr->nr", matrix, tiles.reshape(matrix.shape[0], -1))
    return found.reshape(matrix.shape[1], *tiles.shape[1:-2], TILE)


def _product(a: Array, b: Array | None) -> Array:
    """Multiply in fp32."""
    return a.astype(jnp.float32) if b is None else a.astype(jnp.float32) * b.astype(jnp.float32)
