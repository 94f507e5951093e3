"""Hopper: gradients of one chunk, given the state before it and the gradient of the state behind it.

Gates by key channel decay q and k, gates by value channel do and v. With (a, b) the pair that decays, both have the
same derivatives. Per level (see `mosaic_gpu_forward`) X has F a in second halves and F b in first halves, and

    R = (W + W^T) X,    da = F R in second halves,    db = F R in first halves,    dE = X R

with W = scale do v^T for keys and W = q k^T for values, and dE the gradient of the log of F. X X^T has the scores, or
the gradient of the scores. The gradient of a gate sums dE over the steps whose F it is part of: it is no difference.

With gates by head decays are those of pairs. Their gradients leave the kernel as four numbers a step, see `sum_parts`.

A program takes a chunk, a head and a row. Two warpgroups have 64 channels each of keys and of values.
"""

from collections.abc import Callable, Sequence
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
    Call,
    Pairs,
    Tile,
    along,
    boxes,
    by_row,
    decay,
    multiply,
    ones,
    pairs,
    read,
    spread,
    store,
    tiles,
    zeros,
)

PARTS = 4
"""The summands of a head's gate gradient: pairs, reading and writing by step, states by key channel."""


class Shared(NamedTuple):
    """Shared memory of a program: what is copied, `there` when it is; two spare tiles and scores of each warpgroup."""

    q: Any
    k: Any
    v: Any
    do: Any
    gates: tuple[Any, Any]
    before: Any
    behind: Any
    there: Any
    spare: Any
    scores: Any
    joint: Any


def gradients(streams: Sequence[Array], call: Call, heads: int, interpret: Any) -> tuple[Array, ...]:
    """Return dq, dk, dv as bf16 matrices of each head of v, and the gates' gradient in fp32.

    The latter has whole chunks. For gates by head that is [B, heads x warpgroups x 4, T].

    Args:
      streams: q, k, v, do, two gates as matrices (see `mosaic_gpu_forward`), states before and gradients behind chunks.
    """
    q, v = streams[0], streams[2]
    batch, length, full = v.shape
    keys = heads * call.keys * PIECE
    channels = keys if call.gate == "key" else full
    results = [(length, keys, q.dtype)] * 2 + [(length, full, v.dtype)]
    if call.gate == "head":
        results.append((heads * _warpgroups(call) * PARTS, call.chunks * PIECE, jnp.float32))
    else:
        results.append((call.chunks * PIECE, channels, jnp.float32))
    return tuple(
        mosaic_kernel(
            partial(_program, call=call),
            out_type=[varying_like(v, (batch, steps, width), dtype) for steps, width, dtype in results],
            grid=(call.chunks, heads, batch),
            grid_names=("chunk", "head", "row"),
            num_threads=_warpgroups(call),
            thread_name="warpgroup",
            scratch_types=[_scratch(call)],
            compiler_params=APPROXIMATE,
            interpret=interpret,
            kernel_name=f"gated_linear_attention_{call.gate}_backward",
        )(*streams)
    )


def _warpgroups(call: Call) -> int:
    return min(call.keys, call.workers)


def _scratch(call: Call) -> Shared:
    keys, values, count = call.keys, call.workers, _warpgroups(call)
    channels = keys if call.gate == "key" else values
    gates = plgpu.SMEM((PIECE,), jnp.float32) if call.gate == "head" else tiles(channels)
    copies = 2 * (keys + values + keys * values + (1 if call.gate == "head" else channels))
    return Shared(
        q=tiles(keys),
        k=tiles(keys),
        v=tiles(values),
        do=tiles(values),
        gates=(gates, gates),
        before=tiles(keys, values),
        behind=tiles(keys, values),
        there=plgpu.Barrier(num_arrivals=copies),
        spare=tiles(count, 2),
        scores=tiles(count),
        joint=plgpu.Barrier(num_arrivals=count),
    )


def _program(*refs: Any, call: Call) -> None:
    """Run one chunk of one head of one row."""
    *arrays, dq, dk, dv, dgate, shared = refs
    chunk, head, row = (lax.axis_index(name) for name in ("chunk", "head", "row"))
    worker = lax.axis_index("warpgroup") if _warpgroups(call) > 1 else 0
    pl.when(worker == 0)(lambda: _load(arrays, shared, call))
    plgpu.barrier_wait(shared.there)
    own_keys, own_values = (
        [worker] if _warpgroups(call) > 1 else range(n) for n in (call.keys, call.workers)
    )
    compute = {"head": _by_head, "key": _by_key, "value": _by_value}[call.gate]
    found = compute(shared, list(own_keys), list(own_values), worker, call)
    plgpu.commit_smem()
    steps = pl.ds(chunk * PIECE, PIECE)
    for result, count, done in zip(
        (dq, dk, dv), (call.keys, call.keys, call.workers), found[:3], strict=True
    ):
        for i, tile in done:
            plgpu.copy_smem_to_gmem(tile, result.at[row, steps, pl.ds((head * count + i) * PIECE, PIECE)])
    if call.gate == "head":
        for i, numbers in found[3]:
            dgate[row, (head * _warpgroups(call) + worker) * PARTS + i, steps] = numbers
    else:
        count = call.keys if call.gate == "key" else call.workers
        for i, tile in found[3]:
            dgate[row, steps, pl.ds((head * count + i) * PIECE, PIECE)] = tile
    plgpu.wait_smem_to_gmem(0)


def _load(arrays: Sequence[Any], shared: Shared, call: Call) -> None:
    chunk, head, row = (lax.axis_index(name) for name in ("chunk", "head", "row"))
    q, k, v, do, high, low, before, behind = arrays
    group, at, heads = head // call.ratio, (row, chunk), v.shape[2] // (call.workers * PIECE)
    keys, values = range(call.keys), range(call.workers)
    of, channels = (group, keys) if call.gate == "key" else (head, values)
    found = [
        *boxes(q, at, group, [shared.q.at[i] for i in keys]),
        *boxes(k, at, group, [shared.k.at[i] for i in keys]),
        *boxes(v, at, head, [shared.v.at[i] for i in values]),
        *boxes(do, at, head, [shared.do.at[i] for i in values]),
    ]
    for gate, places in ((high, shared.gates[0]), (low, shared.gates[1])):
        if call.gate == "head":
            found.append((gate.at[row, head, pl.ds(chunk * PIECE, PIECE)], places))
        else:
            found += boxes(gate, at, of, [places.at[i] for i in channels])
    first = ((row * heads + head) * call.chunks + chunk) * call.keys
    for source, place in ((before, shared.before), (behind, shared.behind)):
        for i in keys:
            for j in values:
                box = (pl.ds((first + i) * PIECE, PIECE), pl.ds(j * PIECE, PIECE))
                found.append((source.at[box], place.at[i, j]))
    for source, place in found:
        plgpu.copy_gmem_to_smem(source, place, shared.there)


Done = list[tuple[Any, Any]]
"""Tiles of a result that a warpgroup has made, with their indices."""


def merge_weights(lower: Tile, upper: Tile, masks: Pairs) -> tuple[Tile, Tile]:
    """Return W + W^T off the diagonal in bf16, and the diagonal in each column."""
    both = jnp.where(masks.behind(), upper, lower).astype(jnp.bfloat16)
    return both, spread(jnp.where(masks.same(), lower, 0.0).sum(axis=1))


def _by_head(shared: Shared, keys: list[Any], values: list[Any], worker: Any, call: Call) -> tuple[Done, ...]:
    masks, all_values, all_keys = pairs(), range(call.workers), range(call.keys)
    q, k = ([ref.at[i] for i in all_keys] for ref in (shared.q, shared.k))
    v, do = ([ref.at[j] for j in all_values] for ref in (shared.v, shared.do))
    here, there = spread(by_row(shared.gates[0])), along(shared.gates[0])
    reading, writing = jnp.exp2(here), spread(jnp.exp2(by_row(shared.gates[1])))

    def product(left: list[Any], right: list[Any], decays: Tile) -> Tile:
        return multiply([(a, b.T) for a, b in zip(left, right, strict=True)], call) * decays

    lower = jnp.where(masks.until(), jnp.exp2(here - there), 0.0)
    weights = product(do, v, lower * call.scale)
    weighed = jnp.where(masks.same(), 0.0, product(q, k, weights))
    store(shared.spare.at[worker, 0], weighed)
    behind = multiply([(ones(masks.column >= masks.row), shared.spare.at[worker, 0])], call)
    # Count pairs in the first warpgroup only: both have all.
    spanning = jnp.where((masks.column < masks.row) & (worker == 0), behind, 0.0).sum(axis=1)
    upper = jnp.where(masks.column >= masks.row, jnp.exp2(there - here), 0.0) * call.scale
    weights, turned = weights.astype(jnp.bfloat16), product(v, do, upper).astype(jnp.bfloat16)
    scores = product(k, q, upper).astype(jnp.bfloat16)
    made, read_by, written_by, kept = [], zeros(), zeros(), zeros()
    for j in values:
        entered = multiply([(a, shared.behind.at[i, j]) for i, a in enumerate(k)], call) * writing
        made.append((shared.v.at[j], multiply([(scores, shared.do.at[j])], call, entered)))
    for i in keys:
        states = [[ref.at[i, j] for j in all_values] for ref in (shared.before, shared.behind)]
        place_q, place_k = shared.q.at[i], shared.k.at[i]
        entered, left = product(do, states[0], reading * call.scale), product(v, states[1], writing)
        read_by, written_by = read_by + read(place_q) * entered, written_by + read(place_k) * left
        for a, b in zip(*states, strict=True):
            kept = kept + read(a) * read(b)
        made.append((place_q, multiply([(weights, place_k)], call, entered)))
        made.append((place_k, multiply([(turned, place_q)], call, left)))
    plgpu.barrier_arrive(shared.joint)
    plgpu.barrier_wait(shared.joint)
    plgpu.commit_smem()  # All threads' products have read the places that are written next.
    for place, x in made:
        place[...] = x.astype(jnp.bfloat16)
    numbers = (spanning, *(x.sum(axis=1) for x in (read_by, written_by, kept)))
    tiles_of = [
        [(i, ref.at[i]) for i in own] for ref, own in ((shared.q, keys), (shared.k, keys), (shared.v, values))
    ]
    return *tiles_of, list(enumerate(numbers))


def sum_parts(
    parts: Float[Array, "B rows padded"], sums: Float[Array, "B heads padded"], heads: int
) -> Float[Array, "B padded H"]:
    """Return the gradient of the gates of H heads.

    It is what spans a step, plus what its chunk reads from it on and writes before it.

    Args:
      parts: of all heads and warpgroups, see `PARTS`; the states' are by key channel.
      sums: of each chunk's gates up to a step, in units of log 2; the same heads, or parts of them.
    """
    batch, _, length = parts.shape
    chunks = (batch, sums.shape[1], -1, PARTS, length // PIECE, PIECE)
    pairs, reading, writing, states = jnp.moveaxis(parts.reshape(chunks).sum(2), 2, 0)
    reading = jnp.cumsum(reading[..., ::-1], -1)[..., ::-1]
    writing = jnp.cumsum(jnp.pad(writing[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0))), -1)
    decays = jnp.exp2(sums.reshape(*sums.shape[:2], -1, PIECE)[..., -1:])
    found = pairs + reading + writing + decays * states.sum(-1, keepdims=True)
    return jnp.swapaxes(found.reshape(batch, heads, -1, length).sum(2), 1, 2)


def _by_key(shared: Shared, keys: list[Any], values: list[Any], worker: Any, call: Call) -> tuple[Done, ...]:
    masks, all_values, all_keys = pairs(), range(call.workers), range(call.keys)
    v, do = ([ref.at[j] for j in all_values] for ref in (shared.v, shared.do))
    lower, upper = (multiply([(a, b.T) for a, b in zip(*x, strict=True)], call) for x in ((do, v), (v, do)))
    weights = merge_weights(lower * call.scale, upper * call.scale, masks)
    scores, dq, dk, dgate = zeros(), [], [], []
    for i in keys:
        before, behind = ([ref.at[i, j] for j in all_values] for ref in (shared.before, shared.behind))
        gates = [gate.at[i] for gate in shared.gates]
        products = (
            lambda before=before: (
                multiply([(a, s.T) for a, s in zip(do, before, strict=True)], call) * call.scale
            ),
            lambda behind=behind: multiply([(a, s.T) for a, s in zip(v, behind, strict=True)], call),
            lambda s=before, d=behind: multiply([(a, b.T) for a, b in zip(s, d, strict=True)], call),
        )
        pair = (shared.q.at[i], shared.k.at[i])
        first, second, some, gate = decay_pair(
            pair, 1.0, weights, gates, products, shared.spare.at[worker], masks, call
        )
        scores = scores + some
        # Leave the decayed keys in the keys' place, and the others in the gates' place, which nothing else needs.
        pair[0][...], gates[0][...] = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
        dq.append((i, pair[0]))
        dk.append((i, gates[0]))
        dgate.append((i, gate))
    lower = _exchange(scores * call.scale, shared, worker, masks, call)
    found = []
    for j in values:
        decayed = [(shared.k.at[i], shared.behind.at[i, j]) for i in all_keys]
        place = shared.do.at[j]
        found.append(multiply([*((x.T, place) for x in lower), *decayed], call))
    for j, x in zip(values, found, strict=True):
        shared.v.at[j][...] = x.astype(jnp.bfloat16)
    return dq, dk, [(j, shared.v.at[j]) for j in values], dgate


def _by_value(
    shared: Shared, keys: list[Any], values: list[Any], worker: Any, call: Call
) -> tuple[Done, ...]:
    masks, all_values, all_keys = pairs(), range(call.workers), range(call.keys)
    q, k = ([ref.at[i] for i in all_keys] for ref in (shared.q, shared.k))
    lower, upper = (multiply([(a, b.T) for a, b in zip(*x, strict=True)], call) for x in ((q, k), (k, q)))
    weights, scores, dv, dgate = merge_weights(lower, upper, masks), zeros(), [], []
    for j in values:
        before, behind = ([ref.at[i, j] for i in all_keys] for ref in (shared.before, shared.behind))
        gates = [gate.at[j] for gate in shared.gates]
        products = (
            lambda before=before: multiply(list(zip(q, before, strict=True)), call),
            lambda behind=behind: multiply(list(zip(k, behind, strict=True)), call),
            lambda s=before, d=behind: multiply([(a.T, b) for a, b in zip(s, d, strict=True)], call),
        )
        pair = (shared.do.at[j], shared.v.at[j])
        _, second, some, gate = decay_pair(
            pair, call.scale, weights, gates, products, shared.spare.at[worker], masks, call
        )
        scores = scores + some
        gates[0][...] = second.astype(jnp.bfloat16)
        dv.append((j, gates[0]))
        dgate.append((j, gate))
    lower = _exchange(scores, shared, worker, masks, call)
    dq, dk = [], []
    for i in keys:
        reading = [(shared.do.at[j], shared.before.at[i, j].T) for j in all_values]
        writing = [(shared.v.at[j], shared.behind.at[i, j].T) for j in all_values]
        place_q, place_k = shared.q.at[i], shared.k.at[i]
        first = multiply([*((x, place_k) for x in lower), *reading], call)
        second = multiply([*((x.T, place_q) for x in lower), *writing], call)
        plgpu.commit_smem()  # All threads' products have read the places that are written next.
        place_q[...], place_k[...] = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
        dq.append((i, place_q))
        dk.append((i, place_k))
    return dq, dk, dv, dgate


def _exchange(scores: Tile, shared: Shared, worker: Any, masks: Pairs, call: Call) -> list[Any]:
    """Exchange scores below the diagonal over the warpgroups' channels, in shared memory.

    What was written to shared memory before may be read after.
    """
    store(shared.scores.at[worker], jnp.where(masks.behind(), 0.0, scores))
    if _warpgroups(call) == 1:
        return [shared.scores.at[worker]]
    plgpu.barrier_arrive(shared.joint)
    plgpu.barrier_wait(shared.joint)
    return [shared.scores.at[worker], shared.scores.at[1 - worker]]


def decay_pair(
    pair: tuple[Any, Any],
    factor: float,
    weights: tuple[Tile, Tile],
    gates: Sequence[Any],
    products: tuple[Callable[[], Tile], Callable[[], Tile], Callable[[], Tile]],
    spare: Any,
    masks: Pairs,
    call: Call,
) -> tuple[Tile, Tile, Tile, Tile]:
    """Return da, db, a b^T + b a^T with decays, and the gates' gradient.

    a and b are left decayed to the chunk's ends.

    Args:
      pair: a, to be multiplied by `factor`, and b.
      products: gradients of decayed a and of decayed b by the states, and of states by states, by channel.
    """
    both, diagonal = weights
    turned = Pairs(masks.column, masks.row)
    a, b = (lambda: read(pair[0]) * factor), (lambda: read(pair[1]))

    def add_gate(steps: Any, x: Tile, gate: Tile) -> Tile:
        store(spare.at[1], ones(steps))
        store(spare.at[0], x)
        return multiply([(spare.at[1], spare.at[0])], call, gate)

    def add(level: Array, found: tuple[Tile, ...]) -> tuple[Tile, ...]:
        da, db, scores, gate = found
        second, apart = masks.is_second(level), masks.apart(level) | turned.apart(level)
        decays = decay(masks.to_middle(level), gates, spare.at[1], call)
        spare[1] = jnp.where(apart, both, jnp.zeros((), both.dtype))
        store(spare.at[0], jnp.where(second, a(), b()) * decays)
        reached = multiply([(spare.at[1], spare.at[0])], call)
        scores = scores + jnp.where(apart, multiply([(spare.at[0], spare.at[0].T)], call), 0.0)
        gate = add_gate(turned.to_middle(level), read(spare.at[0]) * reached, gate)
        reached = reached * decays
        return da + jnp.where(second, reached, 0.0), db + jnp.where(second, 0.0, reached), scores, gate

    scores = jnp.where(masks.same(), spread((a() * b()).sum(axis=1)), 0.0)
    found = (diagonal * b(), diagonal * a(), scores, zeros())
    da, db, scores, gate = lax.fori_loop(0, LEVELS, add, found)
    ends = []
    for side, steps, x, product in ((a, "until", da, products[0]), (b, "behind", db, products[1])):
        decays, reached = decay(getattr(masks, steps)(), gates, spare.at[1], call), product()
        decayed = side() * decays
        gate = add_gate(getattr(turned, steps)(), decayed * reached, gate)
        ends.append((x + decays * reached, decayed))
    (da, first), (db, second) = ends
    pair[0][...], pair[1][...] = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
    total = jnp.where(masks.same(), products[2](), 0.0) * decay(None, gates, spare.at[1], call)
    return da, db, scores, add_gate(None, total, gate)
