"""Bytes over the latest W patches in O(S W K) time and O(S K) memory: one distance at a time, online softmax."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.patch_attention.runs import Runs, find_runs, reduce_runs

_LOWEST = -1e30
"""Score of what is masked. Subtracting no less than _FLOOR makes its exp() 0 where nothing is visible as well."""
_FLOOR = -0.5e30

AT_ONCE = 2
"""Distances whose partial sums may exist at a time in the backward pass: in fp32, 1/8 of the size of q and do."""


def lookup(
    q: Float[Array, "B N S H K"],
    k: Float[Array, "B N M H K"],
    v: Float[Array, "B N M H K"],
    latest: Int[Array, "B N S"],
    valid: Bool[Array, "B N M"],
    bias: Float[Array, "H W"],
    *,
    look_back: int,
    distances: tuple[int, ...] | None = None,
) -> Float[Array, "B N S H K"]:
    """Attend from each byte to the keys latest - d, for all distances d; 0 .. look_back - 1 if None."""
    away = tuple(range(look_back)) if distances is None else distances
    q, k, v, bias, latest, valid = vary_alike(q, k, v, bias, latest, valid)
    flat = (x.reshape(-1, *x.shape[3:]) for x in (q, k, v))
    return _lookup(*flat, bias, latest, valid, away).reshape(q.shape)


def _primal(
    q: Float[Array, "T H K"],
    k: Float[Array, "R H K"],
    v: Float[Array, "R H K"],
    bias: Float[Array, "H W"],
    latest: Int[Array, "B N S"],
    valid: Bool[Array, "B N M"],
    distances: tuple[int, ...],
) -> Float[Array, "T H K"]:
    return _attend(q, k, v, bias, latest, valid, distances)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    latest: Array,
    valid: Array,
    distances: tuple[int, ...],
) -> tuple[Array, Any]:
    o, lse = _attend(q, k, v, bias, latest, valid, distances)
    return o, (q, k, v, bias, latest, valid, lse)


_lookup = OwnGradient(_primal, nondiff_argnums=(6,))


def _attend(
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    latest: Array,
    valid: Array,
    distances: tuple[int, ...],
) -> tuple[Float[Array, "T H K"], Float[Array, "T H"]]:
    """Return output, and the log-sum-exp of each byte's scores, no lower than _FLOOR."""
    acc = jnp.zeros(q.shape, jnp.float32)
    total, top = jnp.zeros(q.shape[:2], jnp.float32), jnp.full(q.shape[:2], _FLOOR)
    for i, back in enumerate(distances):
        seen, keys, values = _at_distance(k, v, latest, valid, back)
        scores = _scores(q, keys, bias[:, i], seen)
        higher = jnp.maximum(top, scores)
        keep, p = jnp.exp(top - higher), jnp.exp(scores - higher)
        acc = acc * keep[..., None] + p[..., None] * values
        total, top = total * keep + p, higher
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return (acc / total[..., None]).astype(q.dtype), jnp.where(some, top + jnp.log(total), _FLOOR)


def _backward(distances: tuple[int, ...], saved: Any, do: Float[Array, "T H K"]) -> tuple[Any, ...]:
    """Return gradients.

    Gathers and scores are made again, so that no distance keeps its own.
    """
    q, k, v, bias, latest, valid, lse = saved
    do = jnp.where(lse[..., None] > _FLOOR, do, jnp.zeros((), do.dtype))
    scale = q.shape[-1] ** -0.5
    found = []
    for i, back in enumerate(distances):
        seen, keys, values = _at_distance(k, v, latest, valid, back)
        p = jnp.exp(_scores(q, keys, bias[:, i], seen) - lse)
        found.append((keys, p, jnp.sum(_fp32(do) * values, -1)))
    # Avoid do o: o is rounded, and where one patch has all the weight only its rounding would be left.
    delta = jnp.sum(jnp.stack([p * dp for _, p, dp in found]), 0)
    dq = jnp.zeros(q.shape, jnp.float32)
    weights, dbias = [], []
    for keys, p, dp in found:
        ds = p * (dp - delta)
        dbias.append(jnp.sum(ds, 0))
        weights.append((ds * scale, p))
        dq += (ds * scale)[..., None] * keys
    dk, dv = _of_keys(q, do, weights, latest, valid, distances)
    grads = dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
    return *grads, jnp.stack(dbias, 1).astype(bias.dtype), None, None


def _of_keys(
    q: Array,
    do: Array,
    weights: Sequence[tuple[Array, Array]],
    latest: Array,
    valid: Array,
    distances: tuple[int, ...],
) -> tuple[Float[Array, "R H K"], Float[Array, "R H K"]]:
    """Sum for each key, over the distances d, ds q and p do of the bytes that see it there.

    The bytes whose latest patch is r are a run, and key r - d is what they see at distance d.
    """
    dk, dv = (jnp.zeros((valid.size, *q.shape[1:]), jnp.float32) for _ in range(2))
    runs = find_runs(rising(latest, valid.shape[-1]), valid.shape[-1])
    for i, (back, (ds, p)) in enumerate(zip(distances, weights, strict=True)):
        if i and i % AT_ONCE == 0:
            q, do, dk, dv = lax.optimization_barrier((q, do, dk, dv))
        mine = _seeing(runs, valid, back)
        dk += reduce_runs(lambda pick, x=q, w=ds: pick(w)[..., None] * _fp32(pick(x)), mine)
        dv += reduce_runs(lambda pick, x=do, w=p: pick(w)[..., None] * _fp32(pick(x)), mine)
    return dk, dv


_lookup.defvjp(_forward, _backward)


def rising(latest: Int[Array, "B N S"], keys: int) -> Int[Array, "B N S"]:
    """Return `latest`, but `keys` for bytes after the last that sees a patch.

    `find_runs` wants them sorted.
    """
    after = (latest < 0) & (lax.cummax(latest, axis=2) >= 0)
    return jnp.where(after, keys, latest)


def _seeing(runs: Runs, valid: Bool[Array, "B N M"], back: int) -> Runs:
    """Return, for each key, the bytes that see it at distance `back`.

    They are the run that many patches later, in its block.
    """

    def later(x: Array) -> Array:
        ends, keys = (max(-back, 0), max(back, 0)), valid.shape[-1]
        blocks = jnp.pad(x.reshape(valid.shape), ((0, 0), (0, 0), ends))
        blocks = blocks[..., back:] if back > 0 else blocks[..., :keys]
        return jnp.where(valid, blocks, 0).reshape(-1)

    return runs._replace(starts=later(runs.starts), ends=later(runs.ends))


def _at_distance(
    k: Array, v: Array, latest: Array, valid: Array, back: int
) -> tuple[Bool[Array, "T"], Float[Array, "T H K"], Float[Array, "T H K"]]:
    """Return whether each byte sees the key `back` patches back, and its key and value in fp32.

    Both are zeros where it is not visible.
    """
    keys = valid.shape[-1]
    own = latest.reshape(-1, latest.shape[-1])
    rows = jnp.clip(own - back, 0, keys - 1) + keys * jnp.arange(len(own), dtype=own.dtype)[:, None]
    rows = rows.reshape(-1)
    place = latest.reshape(-1)
    there = place >= back if back >= 0 else (place >= 0) & (place < keys + back)
    seen = there & valid.reshape(-1)[rows]
    here = seen[:, None, None]
    return seen, jnp.where(here, _fp32(k[rows]), 0.0), jnp.where(here, _fp32(v[rows]), 0.0)


def _scores(q: Array, keys: Array, bias: Float[Array, "H"], seen: Bool[Array, "T"]) -> Float[Array, "T H"]:
    scores = jnp.sum(_fp32(q) * keys, -1) * q.shape[-1] ** -0.5 + _fp32(bias)[None]
    return jnp.where(seen[:, None], scores, _LOWEST)


def _fp32(x: Array) -> Array:
    return x.astype(jnp.float32)
