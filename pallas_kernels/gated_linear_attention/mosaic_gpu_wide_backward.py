"""Hopper: gradients under wide keys (`mosaic_gpu_wide`) of one chunk, given the states around it, in two kernels.

With S before the chunk, dS behind it, and do' and v' decayed to the chunk's ends, the first kernel adds up over tiles p
of key channels what gates and values need:

    W = sum_p q_p k_p^T        sum_p q_p S_p        sum_p k_p dS_p        diag sum_p S_p^T dS_p

Then it goes through the levels of the chunk as `mosaic_gpu_backward` does: gradients of v and gates, and D, that of W.
The second kernel takes one tile of key channels a program:

    dq_p = D k_p + do' S_p^T        dk_p = D^T q_p + v' dS_p^T
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import APPROXIMATE, mosaic_kernel
from pallas_kernels.gated_linear_attention.hopper import PIECE
from pallas_kernels.gated_linear_attention.mosaic_gpu_backward import decay_pair, merge_weights
from pallas_kernels.gated_linear_attention.mosaic_gpu_tiles import (
    STAGES,
    Call,
    Pairs,
    State,
    Tile,
    multiply,
    ones,
    pairs,
    read,
    store,
    tiles,
    zeros,
)
from pallas_kernels.gated_linear_attention.mosaic_gpu_wide import (
    VALUES,
    Place,
    copy_tile,
    place_of,
    state_of,
    sum_over_tiles,
    tiles_of_keys,
    values_of,
)


class Values(NamedTuple):
    """Shared memory of a program of the first kernel, of which a multiprocessor has two.

    Attributes:
      q, k, before: tiles of key channels under way; sums over them later, see `_keep`.
      behind: the same; spare tiles later.
      v, do, gates: of the value channels.
      arrived: when they are there.
    """

    q: Any
    k: Any
    before: Any
    behind: Any
    v: Any
    do: Any
    gates: tuple[Any, Any]
    arrived: Any


class Keys(NamedTuple):
    """Shared memory of a program of the second kernel: what it multiplies, when it is there."""

    q: Any
    k: Any
    before: Any
    behind: Any
    weights: Any
    do: Any
    v: Any
    there: Any


def gradients_wide(streams: Sequence[Array], call: Call, heads: int, interpret: Any) -> tuple[Array, ...]:
    """Compute `mosaic_gpu_backward.gradients` for wide keys."""
    q, k, v, _, _, _, before, behind = streams
    batch, length, full = v.shape
    whole = (batch, call.chunks * PIECE, full)
    types = [varying_like(v, shape, kind) for shape, kind in ((v.shape, v.dtype), (whole, jnp.float32))]
    # Add gradients of scores, and do and v with their decays.
    types += [varying_like(v, whole, v.dtype)] * 3
    options: dict[str, Any] = {
        "grid_names": ("chunk", "head", "row"),
        "num_threads": 1,
        "thread_name": "warpgroup",
        "compiler_params": APPROXIMATE,
        "interpret": interpret,
    }
    dv, dgate, *decayed = mosaic_kernel(
        partial(_values, call=call),
        out_type=types,
        grid=(call.chunks, heads, batch),
        scratch_types=[_scratch_of_values()],
        kernel_name="gated_linear_attention_wide_values",
        **options,
    )(*streams)
    keys = varying_like(v, (batch, length, heads * tiles_of_keys(call) * PIECE), q.dtype)
    dq, dk = mosaic_kernel(
        partial(_keys, call=call),
        out_type=[keys, keys],
        grid=(call.chunks, heads * tiles_of_keys(call), batch),
        scratch_types=[_scratch_of_keys()],
        kernel_name="gated_linear_attention_wide_keys",
        **options,
    )(q, k, *decayed, before, behind)
    return dq, dk, dv, dgate


def _scratch_of_values() -> Values:
    return Values(
        q=tiles(STAGES),
        k=tiles(STAGES),
        before=tiles(STAGES),
        behind=tiles(STAGES),
        v=tiles(),
        do=tiles(),
        gates=(tiles(), tiles()),
        arrived=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES + 1),
    )


def _scratch_of_keys() -> Keys:
    return Keys(
        q=tiles(),
        k=tiles(),
        before=tiles(),
        behind=tiles(),
        weights=tiles(),
        do=tiles(),
        v=tiles(),
        there=plgpu.Barrier(num_arrivals=7),
    )


def _values(*refs: Any, call: Call) -> None:
    """Compute gradients of values and gates, and what the second kernel needs.

    They are of one chunk, head and row.
    """
    *arrays, dv, dgate, weights, read_by, written, shared = refs
    at, masks = place_of(call), pairs()
    both = _sums(arrays, at, shared, masks, call)
    _, found, scores, gate = decay_pair(
        (shared.do, shared.v),
        call.scale,
        both,
        shared.gates,
        (partial(_kept, shared.q), partial(_kept, shared.k), partial(_kept, shared.before)),
        shared.behind,
        masks,
        call,
    )
    dgate[values_of(at)] = gate
    shared.gates[0][...] = found.astype(jnp.bfloat16)
    store(shared.q.at[0], jnp.where(masks.behind(), 0.0, scores))
    results = (
        (shared.gates[0], dv),
        (shared.q.at[0], weights),
        (shared.do, read_by),
        (shared.v, written),
    )
    for tile, result in results:
        plgpu.copy_smem_to_gmem(tile, result.at[values_of(at)])
    plgpu.wait_smem_to_gmem(0)


def _sums(arrays: Sequence[Any], at: Place, shared: Values, masks: Pairs, call: Call) -> tuple[Tile, Tile]:
    """Return scores as `decay_pair` takes them.

    The other sums over tiles of key channels stay in shared memory.
    """
    q, k, v, do, high, low, before, behind = arrays
    for source, place in zip((v, do, high, low), (shared.v, shared.do, *shared.gates), strict=True):
        plgpu.copy_gmem_to_smem(source.at[values_of(at)], place, shared.arrived.at[VALUES])

    def copy(tile: Any, slot: Any) -> None:
        copy_tile((q, k), (shared.q, shared.k), shared.arrived, at, tile, slot, call)
        box = state_of(at, tile, v, call)
        for source, place in ((before, shared.before), (behind, shared.behind)):
            plgpu.copy_gmem_to_smem(source.at[box], place.at[slot], shared.arrived.at[slot])

    def add(slot: Any, found: State) -> State:
        a, b, s, d = (ref.at[slot] for ref in (shared.q, shared.k, shared.before, shared.behind))
        products = ((a, b.T), (a, s), (b, d), (s.T, d))
        return tuple(multiply([pair], call, total) for pair, total in zip(products, found, strict=True))

    lower, *sums = sum_over_tiles(copy, add, (zeros(),) * 4, shared.arrived, call)
    for ref, x in zip((shared.q, shared.k, shared.before), sums, strict=True):
        _keep(ref, x)
    # Turn scores over by tensor cores: the diagonal of ones is exact.
    store(shared.behind.at[0], lower)
    store(shared.behind.at[1], ones(masks.same()))
    upper = multiply([(shared.behind.at[1], shared.behind.at[0].T)], call)
    plgpu.barrier_wait(shared.arrived.at[VALUES])
    return merge_weights(lower, upper, masks)


def _keep(ref: Any, x: Tile) -> None:
    """Keep sixteen bits of each number of x, in two tiles."""
    ref[0] = x.astype(jnp.bfloat16)
    ref[1] = (x - x.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)


def _kept(ref: Any) -> Tile:
    return read(ref.at[0]) + read(ref.at[1])


def _keys(*refs: Any, call: Call) -> None:
    """Compute gradients of 64 channels of queries and keys, of one chunk, head and row."""
    q, k, weights, do, v, before, behind, dq, dk, shared = refs
    row, chunk, index = (lax.axis_index(name) for name in ("row", "chunk", "head"))
    head, tile = index // tiles_of_keys(call), index % tiles_of_keys(call)
    at, steps = Place(row, chunk, head, head // call.ratio), pl.ds(chunk * PIECE, PIECE)
    columns = pl.ds((at.group * tiles_of_keys(call) + tile) * PIECE, PIECE)
    sources = [x.at[row, steps, columns] for x in (q, k)]
    sources += [x.at[state_of(at, tile, v, call)] for x in (before, behind)]
    sources += [x.at[values_of(at)] for x in (weights, do, v)]
    for source, place in zip(sources, shared[:7], strict=True):
        plgpu.copy_gmem_to_smem(source, place, shared.there)
    plgpu.barrier_wait(shared.there)
    first = multiply([(shared.weights, shared.k), (shared.do, shared.before.T)], call)
    second = multiply([(shared.weights.T, shared.q), (shared.v, shared.behind.T)], call)
    plgpu.commit_smem()  # All threads' products have read the places that are written next.
    box = (row, steps, pl.ds(index * PIECE, PIECE))
    for place, x, result in ((shared.q, first, dq), (shared.k, second, dk)):
        store(place, x)
        plgpu.copy_smem_to_gmem(place, result.at[box])
    plgpu.wait_smem_to_gmem(0)
