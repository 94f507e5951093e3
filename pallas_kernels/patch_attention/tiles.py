"""What the Hopper kernels are made of: a walk over tiles of 64 rows, and products of them on tensor cores."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.patch_attention.hopper import HEAD, TILE

STAGES = 2
"""Tiles that are under way or in use at a time."""

FLOOR = -0.5e30
"""Log-sum-exp where nothing is visible; what is masked scores lower still."""

LOG2E = math.log2(math.e)

SWIZZLED = (
    plgpu.TilingTransform((8, HEAD)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(2 * HEAD),  # pyright: ignore[reportAbstractUsage]
)

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class Sight(NamedTuple):
    """Who sees whom: query r the keys low_r <= s < high_r with valid_s = 1; key s no query but from_s <= r < to_s.

    Where they are not empty, no bound falls. Bounds and `valid` are int32.
    """

    low: Int[Array, "R"]
    high: Int[Array, "R"]
    valid: Int[Array, "T"]
    seen_from: Int[Array, "T"]
    seen_to: Int[Array, "T"]


def matrix(x: Float[Array, "R H K"]) -> Float[Array, "padded H*K"]:
    """Heads side by side, and a multiple of 8 rows, as the copy engine wants it."""
    return jnp.pad(x.reshape(len(x), -1), ((0, -len(x) % 8), (0, 0)))


def padded(x: Array, rows: int) -> Array:
    """Zeros after the last axis up to a multiple of `rows`, and for one tile more: a tile may begin at any 8th row."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % rows + TILE),))


def reach(low: Array, high: Array, rows: int) -> tuple[Int[Array, "tiles"], Int[Array, "tiles"]]:
    """Where the tiles that `rows` rows look at begin, a multiple of 8, and how many there are."""
    low, high = (jnp.pad(x, (0, -len(x) % rows)).reshape(-1, rows) for x in (low, high))
    first = jnp.min(jnp.where(low < high, low, jnp.iinfo(jnp.int32).max), 1)
    last = jnp.max(jnp.where(low < high, high, 0), 1)
    first = jnp.minimum(first, last) // 8 * 8
    return first, -(-(last - first) // TILE)


def stages(dtype: Any) -> Any:
    """Scratch for the two arrays that a program walks over."""
    return plgpu.SMEM((STAGES, 2, TILE, HEAD), dtype, transforms=SWIZZLED)


def own_tile(rows: int, dtype: Any) -> Any:
    """Scratch for one of a program's own arrays."""
    return plgpu.SMEM((rows, HEAD), dtype, transforms=SWIZZLED)


def walk(
    sources: Sequence[Any],
    columns: Any,
    reached: tuple[Array, Array],
    loaded: Any,
    arrived: Any,
    body: Callable[..., Any],
    carry: Any,
) -> Any:
    """carry = body(tiles, start, carry) over tiles of both sources that are in shared memory, the next on their way."""
    first, steps = reached

    def load(step: Array) -> None:
        slot = step % STAGES
        for i, source in enumerate(sources):
            box = source.at[pl.ds(pl.multiple_of(first + step * TILE, 8), TILE), columns]
            plgpu.copy_gmem_to_smem(box, loaded.at[slot, i], arrived.at[slot])

    def advance(step: Array, carry: Any) -> Any:
        slot = step % STAGES
        plgpu.barrier_wait(arrived.at[slot])
        carry = body((loaded.at[slot, 0], loaded.at[slot, 1]), first + step * TILE, carry)
        plgpu.commit_smem()  # Until every warp is done with what is loaded over.
        pl.when(step + STAGES < steps)(lambda: load(step + STAGES))
        return carry

    lax.fori_loop(0, jnp.minimum(STAGES, steps), lambda step, _: load(step), None)
    return lax.fori_loop(0, steps, advance, carry)


def by_row(x: Any) -> Array:
    """A vector, one element for each row of a product."""
    return plgpu.load(x, layout=BY_ROW, optimized=False)


def across(x: Array) -> Array:
    """One number a row in each of 64 columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], TILE), [0])


def along(x: Any, rows: int) -> Array:
    """One number a column, from memory, in each row."""
    column = plgpu.load(x, layout=BY_COLUMN, optimized=False)
    return lax.broadcast_in_dim(column, (rows, TILE), [1])


def positions(rows: int, axis: int, start: Array) -> Int[Array, "rows 64"]:
    """start + the index along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, TILE), axis, layout=plgpu.Layout.WGMMA) + start


def biased(scores: Array, back: Array, bias: Any, head: Array) -> Array:
    """Scores in units of log 2, the head's bias at each distance added."""
    scores *= HEAD**-0.5 * LOG2E
    if bias is not None:
        for i in range(bias.shape[1]):
            scores = jnp.where(back == i, scores + bias[head, i] * LOG2E, scores)
    return scores


def clear(tile: Any, keep: Any) -> None:
    """Zeros in the rows where `keep` is 0: they may hold NaN, and 0 times NaN is not 0."""
    found = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
    tile[...] = jnp.where(across(by_row(keep)) > 0, found, jnp.zeros_like(found))
    plgpu.commit_smem()


def zeros(rows: int) -> Float[Array, "rows 64"]:
    """An accumulator."""
    return plgpu.layout_cast(jnp.zeros((rows, HEAD), jnp.float32), plgpu.Layout.WGMMA)


def constants(value: float, rows: int) -> Float[Array, "rows"]:
    """The same number for each row."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), BY_ROW)


def product(left: Any, right: Any, interpret: bool) -> Float[Array, "rows 64"]:
    """left @ right in fp32, both in shared memory."""
    if interpret:
        return jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

    def multiply(total: Any) -> Array:
        plgpu.wgmma(total, left, right)
        return total[...]

    shape = (left.shape[0], right.shape[1])
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(total: Array, left: Array, right: Any, interpret: bool) -> Float[Array, "rows 64"]:
    """total + left @ right, of which only `right` is in shared memory."""
    if interpret:  # The simulation knows neither such an accumulator nor a left operand in registers.
        return total + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
    run: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))
    return run(plgpu.WGMMAAccumulatorRef.init(total))


def visible(back: Array, after_low: Bool[Array, "a b"], valid: Array) -> Bool[Array, "a b"]:
    """Whether a key lies in a query's interval and may be seen."""
    return (back >= 0) & after_low & (valid > 0)
