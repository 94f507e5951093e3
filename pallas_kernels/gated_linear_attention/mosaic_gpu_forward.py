"""Hopper: all chunks of a head in one program, its state in registers.

A program takes one row and head of values. One warpgroup copies the next chunks of 64 steps to shared memory. Others
compute, each with 64 value channels and its part [K, 64] of the state in fp32. Per chunk, with the state S before it:

    head gate    o = P S^T q + (D q k^T) v                      S' = p S + k^T (s v)
    key gates    o = S^T (P q) + (sum_l X_l X_l^T) v            S' = p S + (s k)^T v
    value gates  o = P S^T q + sum_l F_l (q k^T)_l (F_l v)      S' = p S + k^T (s v)

P is the decay from the chunk's start up to a step, s that behind a step, p that of the chunk, D that of a pair. Level l
has the pairs that lie in different halves of one block of 2^(l + 1) steps. F_l is the decay between a step and that
block's middle. X_l is F_l k in first halves and F_l q in second halves, so that one product has both sides.

With key gates and two warpgroups each makes scores of 64 key channels. Both then multiply all of them with their
values.
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
    LEVELS,
    STAGES,
    Call,
    Pairs,
    State,
    Tile,
    along,
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
    zeros,
)


class Stage(NamedTuple):
    """A chunk under way: tiles of channels, and gates (of a head: sums up to and behind each step)."""

    q: Any
    k: Any
    v: Any
    gates: tuple[Any, ...]


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
      stage: what is copied, with a leading axis of chunks under way.
      there, free: when it is, and when it may be overwritten.
      spare: two tiles of each warpgroup: a right operand of a product; a left one, or outputs on their way.
      states: what each warpgroup reads from.
      joint: both warpgroups have written their scores, or read those of the other.
    """

    stage: Stage
    there: Any
    free: Any
    spare: Any
    states: Any
    joint: Any


def forward(
    streams: Sequence[Array], call: Call, heads: int, interpret: Any
) -> tuple[Float[Array, "B T HV"], Float[Array, "B H K V"]]:
    """Return outputs, as wide as v, and final states in fp32.

    Args:
      streams: q, k, v as matrices [B, T, heads x channels], gates (see `Stage`), initial states in fp32.
    """
    v, start = streams[2], streams[-1]
    o, final = mosaic_kernel(
        partial(_program, call=call),
        out_type=[varying_like(v, v.shape, v.dtype), varying_like(v, start.shape, jnp.float32)],
        grid=(heads, v.shape[0]),
        grid_names=("head", "row"),
        num_threads=call.workers + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch(call)],
        compiler_params=APPROXIMATE,
        interpret=interpret,
        kernel_name=f"gated_linear_attention_{call.gate}",
    )(*streams)
    return o, final


def _scratch(call: Call) -> Shared:
    keys, workers = call.keys, call.workers
    vectors = [plgpu.SMEM((STAGES, PIECE), jnp.float32)] * 2
    channels = keys if call.gate == "key" else workers
    gates = vectors if call.gate == "head" else [tiles(STAGES, channels)] * 2
    copies = 2 * keys + workers + (2 if call.gate == "head" else 2 * channels)
    return Shared(
        stage=Stage(tiles(STAGES, keys), tiles(STAGES, keys), tiles(STAGES, workers), tuple(gates)),
        there=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=workers, num_barriers=STAGES),
        spare=tiles(workers, 2),
        states=tiles(workers, keys),
        joint=plgpu.Barrier(num_arrivals=workers),
    )


def _program(*refs: Any, call: Call) -> None:
    """Run one head of one row."""
    q, k, v, *gates, start, o, final, shared = refs
    worker = lax.axis_index("warpgroup")

    @pl.when(worker == call.workers)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")
        _feed(Stage(q, k, v, tuple(gates)), shared, call)

    @pl.when(worker < call.workers)
    def _() -> None:
        plgpu.set_max_registers(240, action="increase")
        _compute(start, o, final, shared, call)


def _feed(arrays: Stage, shared: Shared, call: Call) -> None:
    """Copy one chunk after another."""
    row, head, stage = lax.axis_index("row"), lax.axis_index("head"), shared.stage
    group = head // call.ratio

    def sources(step: Array) -> list[tuple[Any, Any]]:
        slot, at = step % STAGES, (row, step)
        keys, workers = ([(slot, i) for i in range(n)] for n in (call.keys, call.workers))
        found = [
            *boxes(arrays.q, at, group, [stage.q.at[place] for place in keys]),
            *boxes(arrays.k, at, group, [stage.k.at[place] for place in keys]),
            *boxes(arrays.v, at, head, [stage.v.at[place] for place in workers]),
        ]
        of, places = (group, keys) if call.gate == "key" else (head, workers)
        for gate, tile in zip(arrays.gates, stage.gates, strict=True):
            if call.gate == "head":
                found.append((gate.at[row, head, pl.ds(step * PIECE, PIECE)], tile.at[slot]))
            else:
                found += boxes(gate, at, of, [tile.at[place] for place in places])
        return found

    feed(sources, shared.there, shared.free, call.chunks)


def _compute(start: Any, o: Any, final: Any, shared: Shared, call: Call) -> None:
    """Compute a warpgroup's value channels, chunk after chunk."""
    row, head, worker = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    own = pl.ds(worker * PIECE, PIECE)
    parts = [(row, head, pl.ds(i * PIECE, PIECE), own) for i in range(call.keys)]
    chunk = {"head": _by_head, "key": _by_key, "value": _by_value}[call.gate]
    spare = shared.spare.at[worker]

    def advance(step: Array, state: State) -> State:
        slot = step % STAGES
        plgpu.barrier_wait(shared.there.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, part in enumerate(state):
            shared.states[worker, i] = part.astype(jnp.bfloat16)
        plgpu.commit_smem()
        out, state = chunk(shared, step, state, call)
        store(spare.at[1], out * call.scale)
        box = (row, pl.ds(step * PIECE, PIECE), pl.ds((head * call.workers + worker) * PIECE, PIECE))
        plgpu.copy_smem_to_gmem(spare.at[1], o.at[box])
        plgpu.barrier_arrive(shared.free.at[slot])
        return state

    state = load_state(start, parts, (spare.at[0], spare.at[1], shared.states.at[worker, 0]))
    state = lax.fori_loop(0, call.chunks, advance, state)
    for box, part in zip(parts, state, strict=True):
        final[box] = part
    plgpu.wait_smem_to_gmem(0)


def _places(shared: Shared, step: Array, call: Call) -> tuple[list[Any], list[Any], Any, list[Any], Any]:
    """Return tiles of q, k, this warpgroup's v, the state before the chunk, and two spare ones."""
    slot, worker, stage = step % STAGES, lax.axis_index("warpgroup"), shared.stage
    q, k = ([ref.at[slot, i] for i in range(call.keys)] for ref in (stage.q, stage.k))
    states = [shared.states.at[worker, i] for i in range(call.keys)]
    return q, k, stage.v.at[slot, worker], states, shared.spare.at[worker]


def _scores(q: list[Any], k: list[Any], call: Call) -> Tile:
    return multiply([(a, b.T) for a, b in zip(q, k, strict=True)], call)


def _written(k: list[Any], v: Any, decayed: Sequence[Tile], call: Call) -> State:
    """Return the state behind the chunk, from what is left of that before it."""
    return tuple(multiply([(a.T, v)], call, total) for a, total in zip(k, decayed, strict=True))


def _by_head(shared: Shared, step: Array, state: State, call: Call) -> tuple[Tile, State]:
    """Run a chunk under gates of heads.

    The difference of sums up to two steps is used: sums were cut where nothing is left.
    """
    q, k, v, states, spare = _places(shared, step, call)
    sums, rest = (ref.at[step % STAGES] for ref in shared.stage.gates)
    here = spread(by_row(sums))
    decays = jnp.where(pairs().until(), jnp.exp2(here - along(sums)), 0.0)
    scores = (_scores(q, k, call) * decays).astype(jnp.bfloat16)
    entered = multiply(list(zip(q, states, strict=True)), call) * jnp.exp2(here)
    out = multiply([(scores, v)], call, entered)
    store(spare.at[0], read(v) * spread(jnp.exp2(by_row(rest))))
    total = jnp.exp2(sums[PIECE - 1])
    return out, _written(k, spare.at[0], [part * total for part in state], call)


def _by_key(shared: Shared, step: Array, state: State, call: Call) -> tuple[Tile, State]:
    q, k, v, states, spare = _places(shared, step, call)
    slot, worker, masks = step % STAGES, lax.axis_index("warpgroup"), pairs()
    gates = [[gate.at[slot, i] for gate in shared.stage.gates] for i in range(call.keys)]
    split = call.workers > 1
    scores = zeros()
    for i in [worker] if split else range(call.keys):
        tile = [ref.at[slot, i] for ref in (shared.stage.q, shared.stage.k)]
        own = [gate.at[slot, i] for gate in shared.stage.gates]
        scores = scores + _scores_by_key(tile, own, spare, masks, call)
    store(spare.at[0], scores)
    weighed = [(spare.at[0], v)]
    if split:
        plgpu.barrier_arrive(shared.joint)
        plgpu.barrier_wait(shared.joint)
        weighed.append((shared.spare.at[1 - worker, 0], v))
    out = multiply([*zip(q, states, strict=True), *weighed], call)
    if split:
        plgpu.barrier_arrive(shared.joint)
    totals = [spread(total_by_row(x, masks, spare.at[1], call)) for x in gates]
    state = tuple(part * total for part, total in zip(state, totals, strict=True))
    state = _written(k, v, state, call)
    if split:
        plgpu.barrier_wait(shared.joint)
    return out, state


def _scores_by_key(tile: list[Any], gates: list[Any], spare: Any, masks: Pairs, call: Call) -> Tile:
    """Return scores over 64 key channels.

    q and k are left with their decays from and to the chunk's ends.
    """
    scores = jnp.where(masks.same(), spread((read(tile[0]) * read(tile[1])).sum(axis=1)), 0.0)

    def add(level: Array, scores: Tile) -> Tile:
        decays = decay(masks.to_middle(level), gates, spare.at[1], call)
        store(spare.at[0], jnp.where(masks.is_second(level), read(tile[0]), read(tile[1])) * decays)
        return scores + jnp.where(masks.apart(level), multiply([(spare.at[0], spare.at[0].T)], call), 0.0)

    scores = lax.fori_loop(0, LEVELS, add, scores)
    for ref, steps in zip(tile, (masks.until(), masks.behind()), strict=True):
        ref[...] = (read(ref) * decay(steps, gates, spare.at[1], call)).astype(jnp.bfloat16)
    return scores


def _by_value(shared: Shared, step: Array, state: State, call: Call) -> tuple[Tile, State]:
    q, k, v, states, spare = _places(shared, step, call)
    gates = [gate.at[step % STAGES, lax.axis_index("warpgroup")] for gate in shared.stage.gates]
    masks, scores = pairs(), _scores(q, k, call)
    out = multiply(list(zip(q, states, strict=True)), call)
    out = read_under_value_gates(scores, out, v, gates, spare, masks, call)
    total, rest = (decay(steps, gates, spare.at[1], call) for steps in (None, masks.behind()))
    store(spare.at[0], read(v) * rest)
    return out, _written(k, spare.at[0], [part * total for part in state], call)


def read_under_value_gates(
    scores: Tile, entered: Tile, v: Any, gates: Sequence[Any], spare: Any, masks: Pairs, call: Call
) -> Tile:
    """Return what a chunk's steps read under gates by value channel, without `scale`.

    Args:
      scores: q k^T of all pairs.
      entered: what they would read from the state before the chunk if nothing were forgotten.
      spare: two tiles.
    """
    out = entered * decay(masks.until(), gates, spare.at[1], call)
    out = out + spread(jnp.where(masks.same(), scores, 0.0).sum(axis=1)) * read(v)
    scores = scores.astype(jnp.bfloat16)

    def add(level: Array, out: Tile) -> Tile:
        decays = decay(masks.to_middle(level), gates, spare.at[1], call)
        spare[1] = jnp.where(masks.apart(level), scores, jnp.zeros((), scores.dtype))
        store(spare.at[0], decays * read(v))
        return out + decays * multiply([(spare.at[1], spare.at[0])], call)

    return lax.fori_loop(0, LEVELS, add, out)
