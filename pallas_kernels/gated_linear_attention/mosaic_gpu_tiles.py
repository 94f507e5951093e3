"""Parts that the Hopper kernels of linear attention share: tiles of 64 x 64, products, and decays as products.

The sum of log gates over a stretch of a chunk is a row of ones times the gates. Two bf16 numbers carry 16 bits of a
gate, and tensor cores add them in fp32. No sum is a difference of two others.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._mosaic_gpu import tile_ref
from pallas_kernels.gated_linear_attention.hopper import PIECE

LEVELS = 6
"""Blocks of 2, 4 ... 64 steps, each of two halves."""

STAGES = 2
"""Chunks whose loads are under way or in use at a time."""

Gate = Literal["head", "key", "value"]
Tile = Float[Array, "64 64"]

State = tuple[Tile, ...]
"""S, or its gradient, by tiles of key channels."""


class Call(NamedTuple):
    """The static part of a program.

    Attributes:
      gate: what has gates of its own.
      chunks: of 64 steps.
      ratio: heads of values to a head of keys.
      keys: tiles of 64 key channels.
      workers: tiles of 64 value channels, a warpgroup each.
      scale: of the outputs.
      simulated: without products whose left operand is in registers.
      pieces: of a state by key channels, each with `keys` tiles; more than one for wide keys (`mosaic_gpu_wide`).
    """

    gate: Gate
    chunks: int
    ratio: int
    keys: int
    workers: int
    scale: float
    simulated: bool
    pieces: int = 1


def tiles(*places: int) -> Any:
    """Return scratch for tiles that tensor cores read."""
    return tile_ref(*places, PIECE, PIECE, dtype=jnp.bfloat16)


def zeros() -> Tile:
    """Return a tile of zeros in registers, laid out as products are."""
    return plgpu.layout_cast(jnp.zeros((PIECE, PIECE), jnp.float32), plgpu.Layout.WGMMA)


def by_row(ref: Any) -> Float[Array, "64"]:
    """Read a vector from memory, one number for each row of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def along(ref: Any) -> Tile:
    """Read one number a column, from memory, in each row."""
    column = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(column, (PIECE, PIECE), [1])


def read(ref: Any) -> Tile:
    """Read a tile from shared memory into registers, in fp32."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def boxes(ref: Any, at: tuple[Any, Any], of: Any, places: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return what of a matrix [B, T, heads x channels] goes to each place.

    Args:
      at: row, and chunk.
      of: head.
      places: one for each tile of a head's channels.
    """
    row, steps = at[0], pl.ds(at[1] * PIECE, PIECE)
    columns = [pl.ds((of * len(places) + i) * PIECE, PIECE) for i in range(len(places))]
    return [(ref.at[row, steps, column], place) for column, place in zip(columns, places, strict=True)]


def feed(sources: Callable[[Array], list[tuple[Any, Any]]], there: Any, free: Any, steps: int) -> None:
    """Copy what each step needs once its place is free; wait for all places at the end."""

    def advance(step: Array, _: None) -> None:
        slot = step % STAGES
        pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
        for source, place in sources(step):
            plgpu.copy_gmem_to_smem(source, place, there.at[slot])

    def drain(step: Array, _: None) -> None:
        plgpu.barrier_wait(free.at[step % STAGES])

    lax.fori_loop(0, steps, advance, None)
    lax.fori_loop(max(steps - STAGES, 0), steps, drain, None)


def multiply(pairs: Sequence[tuple[Any, Any]], call: Call, total: Array | None = None) -> Array:
    """Return total + sum left @ right in fp32.

    `right` is in shared memory, `left` there or in registers, in bf16.
    """
    if call.simulated:
        for left, right in pairs:
            product = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
            total = product if total is None else total + product
        plgpu.commit_smem()  # Threads have read tiles here, where the copy engine may write next.
        assert total is not None
        return total

    def issue(ref: Any) -> None:
        for left, right in pairs:
            plgpu.wgmma(ref, left, right)

    if total is not None:
        run: Any = pl.run_state(issue)
        return run(plgpu.WGMMAAccumulatorRef.init(total))

    def fresh(ref: Any) -> Array:
        issue(ref)
        return ref[...]

    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])
    return pl.run_scoped(fresh, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def load_state(ref: Any, boxes: Sequence[Any], places: Sequence[Any]) -> State:
    """Load fp32 tiles from global memory, bit by bit, by way of three tiles of shared memory.

    Inside `shard_map` what is loaded from global memory varies over mesh axes and a sum of products does not. A loop
    carries one type.
    """
    found = []
    for box in boxes:
        left = plgpu.load(ref.at[box], layout=plgpu.Layout.WGMMA, optimized=False)
        for place in places:
            bits = lax.bitcast_convert_type(left, jnp.int32) & jnp.int32(-65536)
            upper = lax.bitcast_convert_type(bits, jnp.float32)
            place[...], left = upper.astype(jnp.bfloat16), left - upper
        plgpu.commit_smem()
        high, middle, low = (read(place) for place in places)
        found.append(high + (middle + low))
        plgpu.commit_smem()
    return tuple(found)


class Pairs(NamedTuple):
    """Masks over pairs of steps of a chunk, of which one is a row and one a column of a tile."""

    row: Int[Array, "64 64"]
    column: Int[Array, "64 64"]

    def until(self) -> Bool[Array, "64 64"]:
        """Mark steps up to a row's own.

        A state from before the chunk has passed their gates when it is read.
        """
        return self.column <= self.row

    def behind(self) -> Bool[Array, "64 64"]:
        """Mark steps behind a row's own.

        What is written there passes their gates up to the chunk's end.
        """
        return self.column > self.row

    def same(self) -> Bool[Array, "64 64"]:
        """Mark the diagonal."""
        return self.column == self.row

    def is_second(self, level: Array) -> Bool[Array, "64 64"]:
        """Mark rows in the second half of their block of 2^(level + 1)."""
        return ((self.row >> level) & 1) == 1

    def to_middle(self, level: Array) -> Bool[Array, "64 64"]:
        """Mark steps between a row and the middle of its block of 2^(level + 1).

        Its own is among them in the second half.
        """
        start, second = (self.row >> level) << level, self.is_second(level)
        first = jnp.where(second, start, self.row + 1)
        last = jnp.where(second, self.row, start + ((1 << level) - 1))
        return (self.column >= first) & (self.column <= last)

    def apart(self, level: Array) -> Bool[Array, "64 64"]:
        """Mark rows in the second half and columns in the first half of one block of 2^(level + 1)."""
        start, half = (self.row >> level) << level, 1 << level
        return self.is_second(level) & (self.column >= start - half) & (self.column < start)


def pairs() -> Pairs:
    """Return the pairs of a chunk."""
    return Pairs(
        *(plgpu.broadcasted_iota(jnp.int32, (PIECE, PIECE), i, layout=plgpu.Layout.WGMMA) for i in (0, 1))
    )


def ones(where: Bool[Array, "64 64"] | None = None) -> Tile:
    """Return 1 there and 0 elsewhere, in bf16."""
    if where is None:
        return (zeros() + 1.0).astype(jnp.bfloat16)
    return jnp.where(where, zeros() + 1.0, 0.0).astype(jnp.bfloat16)


def decay(steps: Bool[Array, "64 64"] | None, gates: Sequence[Any], place: Any, call: Call) -> Tile:
    """Return 2^(sum of the gates over the steps that each row has; all if None).

    Gates lie in shared memory. The row of ones goes through shared memory, to `place`: see docs/notes/mosaic-gpu.md on
    left operands in registers.
    """
    store(place, ones(steps))
    return jnp.exp2(multiply([(place, gate) for gate in gates], call))


def total_by_row(gates: Sequence[Any], masks: Pairs, place: Any, call: Call) -> Float[Array, "64"]:
    """Return the decay of a chunk by key channel.

    All rows of the product are the same: the diagonal has one to a row.
    """
    return jnp.where(masks.same(), decay(None, gates, place, call), 0.0).sum(axis=1)


def store(ref: Any, x: Tile) -> None:
    """Store x in bf16 where tensor cores will read it, and fence it for them."""
    ref[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


def spread(x: Float[Array, "64"]) -> Tile:
    """Spread one number a row over each column."""
    return lax.broadcast_in_dim(x, (PIECE, PIECE), [0])
