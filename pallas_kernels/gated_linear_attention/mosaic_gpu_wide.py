"""Hopper: keys of more than 128 channels, with gates by value channel.

The same gates act on all key channels, so pieces of a state do not know of each other, and scores and what is read are
sums over tiles of key channels:

    o = P sum_p S_p^T q_p + sum_l F_l (sum_p q_p k_p^T)_l (F_l v)

`mosaic_gpu_states` makes the state before each chunk, a piece of 128 key channels a program. Here a program takes one
chunk of a row and 64 value channels. It copies tile after tile of q, k and the state, two ahead, and adds up products.
Then it reads within the chunk as `mosaic_gpu_forward` does.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import APPROXIMATE, mosaic_kernel
from pallas_kernels.gated_linear_attention.hopper import PIECE
from pallas_kernels.gated_linear_attention.mosaic_gpu_forward import read_under_value_gates
from pallas_kernels.gated_linear_attention.mosaic_gpu_states import states
from pallas_kernels.gated_linear_attention.mosaic_gpu_tiles import (
    STAGES,
    Call,
    State,
    multiply,
    pairs,
    store,
    tiles,
    zeros,
)

VALUES = STAGES
"""The barrier for a program's value channels, behind those for tiles of key channels."""


class Place(NamedTuple):
    """The place of a program: its row, chunk, head of values and head of keys."""

    row: Any
    chunk: Any
    head: Any
    group: Any


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
      q, k, before: tiles of key channels under way.
      v, gates: of the value channels.
      arrived: when they are there.
      spare: two tiles.
    """

    q: Any
    k: Any
    before: Any
    v: Any
    gates: tuple[Any, Any]
    arrived: Any
    spare: Any


def forward_wide(
    streams: Sequence[Array], call: Call, heads: int, interpret: Any
) -> tuple[Float[Array, "B T HV"], Float[Array, "B H K V"]]:
    """Compute `mosaic_gpu_forward.forward` for wide keys."""
    q, k, v, *gates, start = streams
    before, final = states((k, v, *gates, start), call, heads, interpret)
    o = mosaic_kernel(
        partial(_program, call=call),
        out_type=varying_like(v, v.shape, v.dtype),
        grid=(call.chunks, heads, v.shape[0]),
        grid_names=("chunk", "head", "row"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[_scratch()],
        compiler_params=APPROXIMATE,
        interpret=interpret,
        kernel_name="gated_linear_attention_wide",
    )(q, k, v, *gates, before)
    return o, final


def _scratch() -> Shared:
    return Shared(
        q=tiles(STAGES),
        k=tiles(STAGES),
        before=tiles(STAGES),
        v=tiles(),
        gates=(tiles(), tiles()),
        arrived=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES + 1),
        spare=tiles(2),
    )


def _program(
    q: Any, k: Any, v: Any, high: Any, low: Any, before: Any, o: Any, shared: Shared, *, call: Call
) -> None:
    """Run one chunk of one head of one row."""
    at = place_of(call)
    for source, place in zip((v, high, low), (shared.v, *shared.gates), strict=True):
        plgpu.copy_gmem_to_smem(source.at[values_of(at)], place, shared.arrived.at[VALUES])

    def copy(tile: Any, slot: Any) -> None:
        copy_tile((q, k), (shared.q, shared.k), shared.arrived, at, tile, slot, call)
        plgpu.copy_gmem_to_smem(
            before.at[state_of(at, tile, v, call)], shared.before.at[slot], shared.arrived.at[slot]
        )

    def add(slot: Any, found: State) -> State:
        scores, entered = found
        scores = multiply([(shared.q.at[slot], shared.k.at[slot].T)], call, scores)
        return scores, multiply([(shared.q.at[slot], shared.before.at[slot])], call, entered)

    scores, entered = sum_over_tiles(copy, add, (zeros(), zeros()), shared.arrived, call)
    plgpu.barrier_wait(shared.arrived.at[VALUES])
    out = read_under_value_gates(scores, entered, shared.v, shared.gates, shared.spare, pairs(), call)
    store(shared.spare.at[1], out * call.scale)
    plgpu.copy_smem_to_gmem(shared.spare.at[1], o.at[values_of(at)])
    plgpu.wait_smem_to_gmem(0)


def place_of(call: Call) -> Place:
    """Return the place of this program, by the names of its grid."""
    row, chunk, head = (lax.axis_index(name) for name in ("row", "chunk", "head"))
    return Place(row, chunk, head, head // call.ratio)


def values_of(at: Place) -> tuple[Any, ...]:
    """Return the box of its steps and value channels, in a matrix [B, T, heads x 64]."""
    return at.row, pl.ds(at.chunk * PIECE, PIECE), pl.ds(at.head * PIECE, PIECE)


def copy_tile(
    arrays: Sequence[Any], places: Sequence[Any], arrived: Any, at: Place, tile: Any, slot: Any, call: Call
) -> None:
    """Copy a tile of key channels of matrices [B, T, key heads x K]."""
    columns = pl.ds((at.group * tiles_of_keys(call) + tile) * PIECE, PIECE)
    box = (at.row, pl.ds(at.chunk * PIECE, PIECE), columns)
    for array, place in zip(arrays, places, strict=True):
        plgpu.copy_gmem_to_smem(array.at[box], place.at[slot], arrived.at[slot])


def state_of(at: Place, tile: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """Return the box of a tile of key channels in the result of `states`, piece after piece."""
    heads = v.shape[2] // PIECE
    piece = (at.row * heads + at.head) * call.pieces + tile // call.keys
    return pl.ds(((piece * call.chunks + at.chunk) * call.keys + tile % call.keys) * PIECE, PIECE), pl.ds(
        0, PIECE
    )


def tiles_of_keys(call: Call) -> int:
    """Count tiles of 64 key channels of a head."""
    return call.pieces * call.keys


def sum_over_tiles(
    copy: Callable[[Any, Any], None],
    add: Callable[[Any, State], State],
    start: State,
    arrived: Any,
    call: Call,
) -> State:
    """Sum over tiles of key channels, of which `STAGES` are under way or in use.

    Args:
      copy: starts the copies of a tile into a slot.
      add: what a slot's tiles are added to.
      arrived: a barrier for each slot.
    """
    count = tiles_of_keys(call)
    for tile in range(STAGES):
        copy(tile, tile)

    def advance(tile: Array, found: State) -> State:
        slot = tile % STAGES
        plgpu.barrier_wait(arrived.at[slot])
        found = add(slot, found)
        plgpu.commit_smem()  # All threads' products have read the tiles that are written next.
        pl.when(tile + STAGES < count)(lambda: copy(tile + STAGES, slot))
        return found

    return lax.fori_loop(0, count, advance, start)
