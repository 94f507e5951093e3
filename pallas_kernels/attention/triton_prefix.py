"""Triton: a few queries over the filled slots of a cache, whose prefix is cut among programs ("flash decoding").

A program takes one part of a row's longest prefix and one key head, with all queries that share it. A second kernel
merges the parts by log-sum-exp. Parts are as long as the row's own prefix asks: a row gets the same bits whatever other
rows hold, an empty one reads nothing, and the cost goes with what is held, not with the capacity.

Source: Dao et al., Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import PROGRAMS, varying_like
from pallas_kernels._pallas_triton import FLOOR, LOG2E, LOWEST, exp2, launch, log2, product, span, steps
from pallas_kernels.attention.masks import EMPTY_LSE

STEP = 64
"""Slots that a program looks at at a time."""

LONGEST = 8192
"""The most slots of a part, so that a long row among short ones is not left to a few programs."""

MOST_PARTS = 128
"""Parts that a program of the merge holds at once; longer caches have longer parts."""

LEAST_ROWS = 16
"""Rows of the smallest matrix product."""

WARPS, STAGES = 4, 3
"""Warps of a program, and steps whose slots are on their way at a time."""


class _Shape(NamedTuple):
    """Sizes: key heads, queries that share one, how many of these are one token's, and parts of a prefix."""

    groups: int
    shared: int
    together: int
    parts: int


def prefix_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    counts: Int[Array, "B T"],
    times: Int[Array, "B S"],
    *,
    scale: float | None = None,
    cast_output: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Compute `prefix_attention`; what `prefix_why.why_not` refuses is not checked again.

    Args:
      interpret: run on the CPU, for tests.
    """
    q, k, v, counts, times = vary_alike(q, k, v, counts, times)
    (rows, queries, heads, width), (_, slots, groups, _) = q.shape, k.shape
    together = heads // groups
    shape = _Shape(groups, queries * together, together, count_parts(rows * groups, slots))
    by_group = q.reshape(rows, queries, groups, together, width).transpose(0, 2, 1, 3, 4)
    by_group = by_group.reshape(rows, groups, shape.shared, width)
    options = {"stages": STAGES, "warps": WARPS, "interpret": interpret}
    factor = LOG2E * (width**-0.5 if scale is None else scale)
    sizes = (rows, shape.parts, groups, shape.shared)
    out = (varying_like(q, (*sizes, width), jnp.float32), varying_like(q, sizes, jnp.float32))
    attend = partial(_attend, shape=shape, scale=factor, interpret=interpret)
    arrays = (by_group, k, v, counts, times)
    parts = launch(attend, "prefix_attention", rows * shape.parts * groups, out, arrays, **options)
    written = q.dtype if cast_output else jnp.float32
    out = (varying_like(q, by_group.shape, written), varying_like(q, by_group.shape[:3], jnp.float32))
    merge = partial(_merge, shape=shape, interpret=interpret)
    o, lse = launch(merge, "prefix_attention_merge", rows * groups * shape.shared, out, parts, **options)
    o = o.reshape(rows, groups, queries, together, width).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(rows, groups, queries, together).swapaxes(2, 3)
    return o.reshape(q.shape), lse.reshape(rows, heads, queries)


def count_parts(heads: int, slots: int) -> int:
    """Return into how many parts a prefix is cut: enough programs for a GPU, but no part below a step."""
    parts = min(MOST_PARTS, max(-(-PROGRAMS // heads), slots // LONGEST))
    return max(1, min(parts, slots // STEP))


def _attend(
    q: Any,
    k: Any,
    v: Any,
    counts: Any,
    times: Any,
    o: Any,
    sums: Any,
    *,
    shape: _Shape,
    scale: float,
    interpret: bool,
) -> None:
    """Attend to a part; `sums` are log-sum-exps in units of ln 2, LOWEST where nothing is seen."""
    size, program = max(LEAST_ROWS, pl.next_power_of_2(shape.shared)), pl.program_id(0)
    # Keep the heads of a stretch neighbours, so that they read whole rows together.
    group, other = lax.rem(program, shape.groups), lax.div(program, shape.groups)
    part, row = lax.rem(other, shape.parts), lax.div(other, shape.parts)
    here = span(0, size)
    real = here < shape.shared
    end = pltriton.load(counts.at[row, lax.div(here, shape.together)], mask=real, other=0)
    end = jnp.minimum(end, k.shape[1])
    queries = pltriton.load(q.at[row, group, pl.ds(0, size), :], mask=real[:, None], other=0)
    filled = jnp.max(end)
    length = steps(0, filled, shape.parts * STEP) * STEP
    begin = part * length
    stop = jnp.minimum(begin + length, filled)

    def advance(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        start = begin + i * STEP
        at = span(start, STEP)
        inside = at < stop
        keys, values = (
            pltriton.load(x.at[row, pl.ds(start, STEP), group, :], mask=inside[:, None], other=0)
            for x in (k, v)
        )
        held = pltriton.load(times.at[row, pl.ds(start, STEP)], mask=inside, other=-1) >= 0
        seen = held[None] & (at[None] < end[:, None])
        scores = product(queries, keys.astype(queries.dtype).T) * scale
        scores = jnp.where(seen, scores, LOWEST)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        p, kept = exp2(scores - highest[:, None], interpret), exp2(top - highest, interpret)
        added = product(p.astype(queries.dtype), values.astype(queries.dtype))
        return highest, total * kept + jnp.sum(p, axis=1), acc * kept[:, None] + added

    nothing = jnp.zeros((size, q.shape[3]), jnp.float32)
    carry = jnp.full(size, FLOOR, jnp.float32), jnp.zeros(size, jnp.float32), nothing
    top, total, acc = lax.fori_loop(0, steps(begin, stop, STEP), advance, carry)
    found = total > 0
    total = jnp.where(found, total, 1.0)
    part_o, part_sums = o.at[row, part, group, pl.ds(0, size), :], sums.at[row, part, group, pl.ds(0, size)]
    pltriton.store(part_o, acc * (1 / total)[:, None], mask=real[:, None])
    pltriton.store(part_sums, jnp.where(found, top + log2(total, interpret), LOWEST), mask=real)


def _merge(part_o: Any, part_sums: Any, o: Any, lse: Any, *, shape: _Shape, interpret: bool) -> None:
    """Merge the parts of one query."""
    size, program = pl.next_power_of_2(shape.parts), pl.program_id(0)
    query, other = lax.rem(program, shape.shared), lax.div(program, shape.shared)
    group, row = lax.rem(other, shape.groups), lax.div(other, shape.groups)
    real = span(0, size) < shape.parts
    sums = pltriton.load(part_sums.at[row, pl.ds(0, size), group, query], mask=real, other=LOWEST)
    values = pltriton.load(part_o.at[row, pl.ds(0, size), group, query, :], mask=real[:, None], other=0)
    top = jnp.maximum(jnp.max(sums), FLOOR)
    weights = exp2(sums - top, interpret)
    total = jnp.sum(weights)
    found = total > 0
    total = jnp.where(found, total, 1.0)
    o[row, group, query, :] = jnp.sum(values * (weights * (1 / total))[:, None], axis=0).astype(o.dtype)
    lse[row, group, query] = jnp.where(found, (top + jnp.log2(total)) / LOG2E, EMPTY_LSE)
