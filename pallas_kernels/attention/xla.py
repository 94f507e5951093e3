"""Attention in blocks with an online softmax: memory O(T), exact, in plain XLA.

Scores exist for one pair of blocks at a time; pairs that a causal mask or a window rules out are not visited,
so a window costs O(T * window). With a rule a schedule lists the pairs (`schedule.py`), and full ones are not masked.
The backward pass makes the scores again from the saved log-sum-exp.
Sources: Rabe and Staats, 2112.05682; Dao et al., FlashAttention, 2205.14135, algorithms 1 and 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import current_device
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.attention import blocks as cut
from pallas_kernels.attention.choices import by_query
from pallas_kernels.attention.masks import EMPTY_LSE, Mask
from pallas_kernels.attention.rules import Rule
from pallas_kernels.attention.schedule import Live, Schedule, Tokens, find_live
from pallas_kernels.attention.scores import Score

# Masked scores are EMPTY_LSE. Taking off no less than this makes exp() of them 0 in rows without a key too.
_FLOOR = EMPTY_LSE / 2


@dataclass(frozen=True)
class _Plan:
    blocks: cut.Blocks
    scale: float
    out_dtype: Any
    score: Score | None = None


class _Marks(NamedTuple):
    """What the mask compares: tags (segments, padding; None if all equal), positions (None if indices), a rule."""

    q_tags: Int[Array, "..."] | None
    kv_tags: Int[Array, "..."] | None
    q_positions: Int[Array, "..."] | None
    kv_positions: Int[Array, "..."] | None
    rule: Rule | None = None


class _Operands(NamedTuple):
    """The inputs cut into blocks, block index first."""

    q: Float[Array, "n B G R q K"]
    k: Float[Array, "m B G s K"]
    v: Float[Array, "m B G s K"]
    slopes: Float[Array, "G R"] | None
    marks: _Marks


class _Partial(NamedTuple):
    """Softmax over some keys: the sums of exp(score - top) v and of exp(score - top), and top."""

    acc: Float[Array, "B G R q K"]
    total: Float[Array, "B G R q"]
    top: Float[Array, "B G R q"]


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
    score: Score | None = None,
) -> Float[Array, "B T H K"]:
    """Return the output alone, in q's dtype."""
    return _attend(q, k, v, mask, alibi_slopes, scale, q.dtype, score)[0]


def attention_with_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Return output and log-sum-exp, both fp32 and both differentiable."""
    return _attend(q, k, v, mask, alibi_slopes, scale, jnp.float32)


def gradients_given_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    o: Float[Array, "B T H K"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Return what these keys add to dq, and dk and dv: fp32, from the output and the log-sum-exp over all keys."""
    plan = _plan(q, k, mask, scale, jnp.float32)
    given = _alike((q, k, v, None, _marks(mask, plan.blocks), o, lse), do)
    return _gradients(plan, given[0], (given[1], jnp.zeros_like(lse)))[:3]


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    slopes: Array | None,
    scale: float | None,
    out_dtype: Any,
    score: Score | None = None,
) -> tuple[Array, Array]:
    plan = _plan(q, k, mask, scale, out_dtype, score)
    return _blockwise(plan, *_alike(q, k, v, slopes, _marks(mask, plan.blocks)))


def _alike(*trees: Any) -> Any:
    leaves, tree = jax.tree.flatten(trees)
    return jax.tree.unflatten(tree, vary_alike(*leaves))


def _plan(
    q: Array, k: Array, mask: Mask, scale: float | None, out_dtype: Any, score: Score | None = None
) -> _Plan:
    blocks = cut.choose_blocks(
        q.shape[1],
        k.shape[1],
        interval=mask.interval,
        by_index=mask.positions is None,
        size=cut.CPU_BLOCK if current_device().platform == "cpu" else cut.BLOCK,
        grain=None if mask.rule is None else mask.rule.grain,
    )
    return _Plan(blocks, q.shape[-1] ** -0.5 if scale is None else float(scale), jnp.dtype(out_dtype), score)


def _marks(mask: Mask, blocks: cut.Blocks) -> _Marks:
    q_valid, kv_valid = mask.valid(blocks.queries, blocks.keys)
    here, there = (None, None) if mask.positions is None else (mask.positions.q, mask.positions.of_keys)
    places = here, there, None if mask.rule is None else by_query(mask.rule, blocks.queries)
    # A causal mask over indices hides the padding behind the last key by itself; with a rule, `_scores` hides it.
    hidden = blocks.pad_k == 0 or (blocks.by_index and (mask.interval.causal or mask.rule is not None))
    if q_valid is None and kv_valid is None and hidden:
        return _Marks(None, None, *places)
    return _Marks(*mask.tags(blocks.queries, blocks.keys), *places)


def _run(
    plan: _Plan, q: Array, k: Array, v: Array, slopes: Array | None, marks: _Marks
) -> tuple[Array, Array]:
    x = _cut(plan, q, k, v, slopes, marks)
    if plan.blocks.alone:
        sums = jax.tree.map(lambda a: a[None], _softmax(_scores(plan, x, 0, 0)[0], x.v[0]))
    else:
        rows = x.q.shape[:-1]
        zeros = _Partial(
            jnp.zeros(x.q.shape, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.full(rows, _FLOOR, jnp.float32),
        )

        def step(sums: _Partial, i: Any, j: Any, partial: Any = None) -> _Partial:
            block = _softmax(_scores(plan, x, i, j, partial)[0], _get(x.v, j))
            row = _merge(jax.tree.map(lambda a: _get(a, i), sums), block)
            return jax.tree.map(lambda a, b: _put(a, b, i), sums, row)

        sums = _pairs(plan, x).walk(step, _Partial(*vary_alike(*zeros, q)[:3]))
    some = sums.total > 0
    total = jnp.where(some, sums.total, 1.0)
    o = (sums.acc / total[..., None]).astype(plan.out_dtype)
    lse = jnp.where(some, sums.top + jnp.log(total), EMPTY_LSE)
    return cut.join_queries(o, plan.blocks), cut.join_rows(lse, plan.blocks)


def _forward(
    plan: _Plan, q: Array, k: Array, v: Array, slopes: Array | None, marks: _Marks
) -> tuple[Any, Any]:
    o, lse = _run(plan, q, k, v, slopes, marks)
    return (o, lse), (q, k, v, slopes, marks, o, lse)


def _backward(plan: _Plan, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, slopes = saved[:4]
    dq, dk, dv, dslopes = _gradients(plan, saved, cotangents)
    if slopes is not None and dslopes is not None:
        dslopes = dslopes.reshape(slopes.shape).astype(slopes.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dslopes, None


def _gradients(
    plan: _Plan, saved: Any, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array | None]:
    """Return fp32 gradients of q, k, v and the slopes."""
    q, k, v, slopes, marks, o, lse = saved
    do, dlse = cotangents
    groups, blocks = k.shape[2], plan.blocks
    x = _cut(plan, q, k, v, slopes, marks)
    # d score = p (do.v - do.o + dlse): what is the same for all keys is one number a query.
    dots = jnp.einsum("bthk,bthk->bht", do.astype(jnp.float32), o.astype(jnp.float32))
    delta = cut.cut_rows(dots - dlse, groups, blocks)
    # Keep p zero in the padding behind the last query, whose scores a function of scores may make infinite.
    lse = cut.cut_rows(jnp.maximum(lse, _FLOOR), groups, blocks, fill=-_FLOOR)
    do = cut.cut_queries(do.astype(q.dtype), groups, blocks)

    def backward(i: Any, j: Any, partial: Any = None) -> tuple[Array, Array, Array, Array | None]:
        return _pair_gradients(plan, x, _get(do, i), _get(lse, i), _get(delta, i), i, j, partial)

    dq, dk, dv, dslopes = _sum_pairs(plan, backward, x)
    return cut.join_queries(dq, blocks), cut.join_keys(dk, blocks), cut.join_keys(dv, blocks), dslopes


_blockwise = OwnGradient(_run, nondiff_argnums=(0,))
_blockwise.defvjp(_forward, _backward)


def _pair_gradients(
    plan: _Plan, x: _Operands, do: Array, lse: Array, delta: Array, i: Any, j: Any, partial: Any
) -> tuple[Array, Array, Array, Array | None]:
    """Return what one pair of blocks adds to dq, dk, dv and the gradient of the slopes."""
    q, k, v = _get(x.q, i), _get(x.k, j), _get(x.v, j)
    scores, pull = _scores(plan, x, i, j, partial)
    p = jnp.exp(scores - lse[..., None])
    dv = _dot("bgrqs,bgrqk->bgsk", p.astype(v.dtype), do)
    ds, dslopes = pull(p * (_dot("bgrqk,bgsk->bgrqs", do, v) - delta[..., None]))
    ds = (ds * plan.scale).astype(q.dtype)
    return _dot("bgrqs,bgsk->bgrqk", ds, k), _dot("bgrqs,bgrqk->bgsk", ds, q), dv, dslopes


def _sum_pairs(
    plan: _Plan, backward: Callable[..., Any], x: _Operands
) -> tuple[Array, Array, Array, Array | None]:
    """Return dq by block of queries, dk and dv by block of keys, the gradient of the slopes in all."""
    if plan.blocks.alone:
        dq, dk, dv, dslopes = backward(0, 0)
        return dq[None], dk[None], dv[None], dslopes
    zeros = [None if a is None else jnp.zeros(a.shape, jnp.float32) for a in (x.q, x.k, x.v, x.slopes)]

    def step(sums: Any, i: Any, j: Any, partial: Any = None) -> Any:
        dq, dk, dv, dslopes = backward(i, j, partial)
        blockwise = _add(sums[0], dq, i), _add(sums[1], dk, j), _add(sums[2], dv, j)
        return (*blockwise, None if dslopes is None else sums[3] + dslopes)

    # By blocks of keys, so that dk and dv, two arrays of three, stay in a cache.
    return _pairs(plan, x, transposed=True).walk(step, vary_alike(*zeros, x.q)[:4])


def _pairs(plan: _Plan, x: _Operands, *, transposed: bool = False) -> Schedule:
    """Return the pairs of blocks that meet; without a rule by the interval alone."""
    if x.marks.rule is None:
        return Schedule(None, None, plan.blocks.pairs())
    return _live(plan.blocks, x.marks).schedule(transposed=transposed)


def _live(blocks: cut.Blocks, marks: _Marks) -> Live:
    queries, keys = Tokens(marks.q_tags, marks.q_positions), Tokens(marks.kv_tags, marks.kv_positions)
    return find_live(blocks, marks.rule, queries, keys)


def _cut(plan: _Plan, q: Array, k: Array, v: Array, slopes: Array | None, marks: _Marks) -> _Operands:
    blocks, (heads, groups) = plan.blocks, (q.shape[2], k.shape[2])

    def queries(a: Array | None, fill: int) -> Array | None:
        return None if a is None else cut.cut_marks(a, blocks.block_q, blocks.pad_q, fill)

    def keys(a: Array | None, fill: int) -> Array | None:
        return None if a is None else cut.cut_marks(a, blocks.block_k, blocks.pad_k, fill)

    return _Operands(
        q=cut.cut_queries(q, groups, blocks),
        k=cut.cut_keys(k, blocks),
        v=cut.cut_keys(v, blocks),
        slopes=None if slopes is None else slopes.astype(jnp.float32).reshape(groups, heads // groups),
        marks=_Marks(
            queries(marks.q_tags, 0),
            keys(marks.kv_tags, -1),
            queries(marks.q_positions, 0),
            keys(marks.kv_positions, 0),
            jax.tree.map(lambda lists: cut.cut_lists(lists, blocks), marks.rule),
        ),
    )


def _scores(
    plan: _Plan, x: _Operands, i: Any, j: Any, partial: Any = None
) -> tuple[Float[Array, "B G R q s"], Callable[[Array], tuple[Array, Array | None]]]:
    """Return masked scores of a pair of blocks, and their pullback to scaled products and slopes.

    Nothing is masked where `partial`, if it is given, is 0.
    """
    products = _dot("bgrqk,bgsk->bgrqs", _get(x.q, i), _get(x.k, j)) * plan.scale
    blocks, marks = plan.blocks, x.marks
    if marks.q_positions is not None and marks.kv_positions is not None:
        here, there = _get(marks.q_positions, i), _get(marks.kv_positions, j)
    else:
        here = (i * blocks.block_q + jnp.arange(blocks.block_q, dtype=jnp.int32))[None]
        there = (j * blocks.block_k + jnp.arange(blocks.block_k, dtype=jnp.int32))[None]
    distance = here[:, :, None] - there[:, None, :]
    ahead, places = distance.astype(jnp.float32), (here[:, None, None, :, None], there[:, None, None, None])
    if x.slopes is not None:
        products -= x.slopes[None, :, :, None, None] * ahead[:, None, None]
    scores = products
    if plan.score is not None:
        heads = jnp.arange(products.shape[1] * products.shape[2], dtype=jnp.int32)
        places = (heads.reshape(1, *products.shape[1:3], 1, 1), *places)
        scores = plan.score(products, *places)

    def pull(ds: Array) -> tuple[Array, Array | None]:
        if plan.score is not None:
            ds = jax.jvp(lambda s: plan.score(s, *places), (products,), (ds,))[1]  # pyright: ignore[reportOptionalCall]
        return ds, None if x.slopes is None else -jnp.sum(ds * ahead[:, None, None], (0, 3, 4))

    def hide(scores: Array) -> Array:
        for seen in _conditions(blocks, marks, distance, i, j, places[-2:]):
            scores = jnp.where(seen, scores, EMPTY_LSE)
        return scores

    return hide(scores) if partial is None else lax.cond(partial > 0, hide, lambda s: s, scores), pull


def _conditions(
    blocks: cut.Blocks, marks: _Marks, distance: Array, i: Any, j: Any, places: tuple[Array, Array]
) -> list[Bool[Array, "#B #G #R #q s"]]:
    """Return what must hold for a query of block i to see a key of block j."""
    found = [seen[:, None, None] for seen in blocks.interval.conditions(distance)]
    if marks.q_tags is not None and marks.kv_tags is not None:
        same = _get(marks.q_tags, i)[:, :, None] == _get(marks.kv_tags, j)[:, None, :]
        found.append(same[:, None, None])
    if marks.rule is not None:
        rule = jax.tree.map(lambda lists: _get(lists, i), marks.rule)
        found.append(rule.sees(*places))
        if blocks.pad_k and marks.kv_tags is None:
            found.append(places[1] < blocks.keys)
    return found


def _softmax(scores: Float[Array, "B G R q s"], v: Float[Array, "B G s K"]) -> _Partial:
    top = jnp.maximum(jnp.max(scores, -1), _FLOOR)
    p = jnp.exp(scores - top[..., None])
    return _Partial(_dot("bgrqs,bgsk->bgrqk", p.astype(v.dtype), v), jnp.sum(p, -1), top)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    top = jnp.maximum(a.top, b.top)
    keep, add = jnp.exp(a.top - top), jnp.exp(b.top - top)
    acc = a.acc * keep[..., None] + b.acc * add[..., None]
    return _Partial(acc, a.total * keep + b.total * add, top)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _get(x: Array, i: Any) -> Array:
    return x[i] if isinstance(i, int) else lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: Array, block: Array, i: Any) -> Array:
    return lax.dynamic_update_index_in_dim(x, block, i, 0)


def _add(x: Array, block: Array, i: Any) -> Array:
    return _put(x, _get(x, i) + block, i)
