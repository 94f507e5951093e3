"""Hopper: the state before each chunk, or in reverse its gradient behind each, in bf16.

    S_{n+1} = p_n S_n + sum_j s_j k_j v_j^T          dS_n = p_n dS_{n+1} + scale sum_i P_i q_i do_i^T

with P the decay from the chunk's start up to a step, s that behind a step and p that of the chunk, by head, by key
channel or by value channel. A program takes a row and head of values, a warpgroup 64 value channels. Wide keys are cut
into pieces, a program each: pieces of a state pass from chunk to chunk without knowing of each other.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import APPROXIMATE, mosaic_kernel
from pallas_kernels.gated_linear_attention.hopper import PIECE
from pallas_kernels.gated_linear_attention.mosaic_gpu_tiles import (
    STAGES,
    Call,
    State,
    boxes,
    by_row,
    decay,
    feed,
    load_state,
    multiply,
    pairs,
    read,
    spread,
    store,
    tiles,
    total_by_row,
)


class Shared(NamedTuple):
    """Shared memory of a program: what is copied, when it is there and free, what is multiplied, what is written.

    The last of a warpgroup's three spare tiles has left operands of the sums of gates.
    """

    left: Any
    right: Any
    gates: tuple[Any, ...]
    there: Any
    free: Any
    spare: Any
    states: Any


def states(
    streams: Sequence[Array], call: Call, heads: int, interpret: Any, *, reverse: bool = False
) -> tuple[Float[Array, "BHNK V"], Float[Array, "B H K V"]]:
    """Return the state before each chunk, as a matrix, and what leaves the last.

    With `reverse` it is the gradient behind each chunk, and what leaves the first.

    Args:
      streams: k and v (`reverse`: q and the outputs' cotangent), gates as of the forward kernel, what enters, in fp32.
    """
    left, start = streams[0], streams[-1]
    programs, tall, width = heads * call.pieces, call.keys * PIECE, call.workers * PIECE
    rows, entering = left.shape[0] * programs * call.chunks * tall, (start.shape[0], programs, tall, width)
    # Lay axes as in a matrix [B, T, channels], the kind of array that the results are.
    kept = varying_like(left, (1, rows, width), left.dtype)
    found, last = mosaic_kernel(
        partial(_program, call=call, reverse=reverse),
        out_type=[kept.update(shape=(rows, width)), varying_like(start, entering, jnp.float32)],
        grid=(programs, left.shape[0]),
        grid_names=("head", "row"),
        num_threads=call.workers + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch(call)],
        compiler_params=APPROXIMATE,
        interpret=interpret,
        kernel_name=f"gated_linear_attention_{call.gate}_{'gradients' if reverse else 'states'}",
    )(*streams[:-1], start.reshape(entering))
    return found, last.reshape(start.shape)


def _scratch(call: Call) -> Shared:
    keys, workers = call.keys, call.workers
    channels = keys if call.gate == "key" else workers
    gates = [plgpu.SMEM((STAGES, PIECE), jnp.float32) if call.gate == "head" else tiles(STAGES, channels)] * 2
    copies = keys + workers + (2 if call.gate == "head" else 2 * channels)
    return Shared(
        left=tiles(STAGES, keys),
        right=tiles(STAGES, workers),
        gates=tuple(gates),
        there=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=workers, num_barriers=STAGES),
        spare=tiles(workers, 3),
        states=tiles(workers, keys),
    )


def _program(*refs: Any, call: Call, reverse: bool) -> None:
    """Run one head of one row."""
    left, right, *gates, start, found, last, shared = refs
    worker = lax.axis_index("warpgroup")

    @pl.when(worker == call.workers)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")
        _feed((left, right, *gates), shared, call, reverse)

    @pl.when(worker < call.workers)
    def _() -> None:
        plgpu.set_max_registers(240, action="increase")
        _compute(start, found, last, shared, call, reverse)


def _feed(arrays: Sequence[Any], shared: Shared, call: Call, reverse: bool) -> None:
    row, head = lax.axis_index("row"), lax.axis_index("head")
    piece, head = (head % call.pieces, head // call.pieces) if call.pieces > 1 else (0, head)
    group = head // call.ratio
    group = group * call.pieces + piece if call.pieces > 1 else group

    def sources(step: Array) -> list[tuple[Any, Any]]:
        slot, chunk = step % STAGES, call.chunks - 1 - step if reverse else step
        keys, workers = ([(slot, i) for i in range(n)] for n in (call.keys, call.workers))
        found = [
            *boxes(arrays[0], (row, chunk), group, [shared.left.at[place] for place in keys]),
            *boxes(arrays[1], (row, chunk), head, [shared.right.at[place] for place in workers]),
        ]
        of, places = (group, keys) if call.gate == "key" else (head, workers)
        for gate, tile in zip(arrays[2:], shared.gates, strict=True):
            if call.gate == "head":
                found.append((gate.at[row, head, pl.ds(chunk * PIECE, PIECE)], tile.at[slot]))
            else:
                found += boxes(gate, (row, chunk), of, [tile.at[place] for place in places])
        return found

    feed(sources, shared.there, shared.free, call.chunks)


def _compute(start: Any, found: Any, last: Any, shared: Shared, call: Call, reverse: bool) -> None:
    """Compute a warpgroup's value channels, chunk after chunk."""
    row, head, worker = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    own = pl.ds(worker * PIECE, PIECE)
    parts = [(row, head, pl.ds(i * PIECE, PIECE), own) for i in range(call.keys)]
    heads = start.shape[1]

    def advance(step: Array, state: State) -> State:
        chunk = call.chunks - 1 - step if reverse else step
        plgpu.barrier_wait(shared.there.at[step % STAGES])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        first = ((row * heads + head) * call.chunks + chunk) * call.keys
        for i, part in enumerate(state):
            shared.states[worker, i] = part.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for i in range(call.keys):
            box = (pl.ds((first + i) * PIECE, PIECE), own)
            plgpu.copy_smem_to_gmem(shared.states.at[worker, i], found.at[box])
        state = _pass(shared, step % STAGES, state, call, reverse)
        plgpu.commit_smem()  # Threads have read tiles, where the copy engine writes next.
        plgpu.barrier_arrive(shared.free.at[step % STAGES])
        return state

    state = load_state(start, parts, [shared.spare.at[worker, i] for i in range(3)])
    state = lax.fori_loop(0, call.chunks, advance, state)
    for box, part in zip(parts, state, strict=True):
        last[box] = part
    plgpu.wait_smem_to_gmem(0)


def _pass(shared: Shared, slot: Array, state: State, call: Call, reverse: bool) -> State:
    """Return the state on the chunk's other side."""
    worker, masks = lax.axis_index("warpgroup"), pairs()
    left, right = [shared.left.at[slot, i] for i in range(call.keys)], shared.right.at[slot, worker]
    spare, factor = shared.spare.at[worker], call.scale if reverse else 1.0
    steps = masks.until() if reverse else masks.behind()
    if call.gate == "key":
        channels = [[gate.at[slot, i] for gate in shared.gates] for i in range(call.keys)]
        for i, gates in enumerate(channels):
            spare[i] = (read(left[i]) * factor * decay(steps, gates, spare.at[2], call)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        left = [spare.at[i] for i in range(call.keys)]
        totals = [spread(total_by_row(gates, masks, spare.at[2], call)) for gates in channels]
    else:
        if call.gate == "head":
            sums, rest = (ref.at[slot] for ref in shared.gates)
            weights, total = spread(jnp.exp2(by_row(sums if reverse else rest))), jnp.exp2(sums[PIECE - 1])
        else:
            gates = [gate.at[slot, worker] for gate in shared.gates]
            weights, total = (decay(x, gates, spare.at[2], call) for x in (steps, None))
        store(spare.at[0], read(right) * factor * weights)
        right, totals = spare.at[0], [total] * call.keys
    return tuple(
        multiply([(x.T, right)], call, part * total)
        for x, part, total in zip(left, state, totals, strict=True)
    )
