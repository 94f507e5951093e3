"""Bytes over the latest W patches in O(S W K) time and O(S K) memory: one distance at a time, online softmax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import vary_alike

_LOWEST = -1e30
"""Score of what is masked. Subtracting no less than _FLOOR makes its exp() 0 where nothing is visible as well."""
_FLOOR = -0.5e30


def lookup(
    q: Float[Array, "B N S H K"],
    k: Float[Array, "B N M H K"],
    v: Float[Array, "B N M H K"],
    latest: Int[Array, "B N S"],
    valid: Bool[Array, "B N M"],
    bias: Float[Array, "H W"],
    *,
    look_back: int,
) -> Float[Array, "B N S H K"]:
    """Each byte over the keys latest, latest - 1, ..., latest - look_back + 1."""
    del look_back  # The width of `bias`, as the caller checked.
    return _lookup(*vary_alike(q, k, v, bias, latest, valid))


def _over_blocks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn over B and N; its fourth argument, the bias, is the same for all."""

    def mapped(q: Array, k: Array, v: Array, bias: Array, *rest: Array) -> Any:
        def block(q: Array, k: Array, v: Array, *rest: Array) -> Any:
            return fn(q, k, v, bias, *rest)

        return jax.vmap(jax.vmap(block))(q, k, v, *rest)

    return mapped


def _primal(q: Array, k: Array, v: Array, bias: Array, latest: Array, valid: Array) -> Array:
    return _over_blocks(_attend)(q, k, v, bias, latest, valid)[0]


def _forward(q: Array, k: Array, v: Array, bias: Array, latest: Array, valid: Array) -> tuple[Array, Any]:
    o, lse = _over_blocks(_attend)(q, k, v, bias, latest, valid)
    return o, (q, k, v, bias, latest, valid, o, lse)


def _backward(saved: Any, do: Array) -> tuple[Any, ...]:
    dq, dk, dv, dbias = _over_blocks(_pull)(*saved, do)
    return dq, dk, dv, jnp.sum(dbias, (0, 1)).astype(saved[3].dtype), None, None


_lookup = jax.custom_vjp(_primal)
_lookup.defvjp(_forward, _backward)


def _attend(
    q: Float[Array, "S H K"],
    k: Float[Array, "M H K"],
    v: Float[Array, "M H K"],
    bias: Float[Array, "H W"],
    latest: Int[Array, "S"],
    valid: Bool[Array, "M"],
) -> tuple[Float[Array, "S H K"], Float[Array, "S H"]]:
    """Output of one block, and the log-sum-exp of its scores, no lower than _FLOOR."""
    acc = jnp.zeros(q.shape, jnp.float32)
    total, top = jnp.zeros(q.shape[:2], jnp.float32), jnp.full(q.shape[:2], _FLOOR)
    for back in range(bias.shape[1]):
        _, seen, keys, values = _at_distance(k, v, latest, valid, back)
        scores = _scores(q, keys, bias[:, back], seen)
        higher = jnp.maximum(top, scores)
        keep, p = jnp.exp(top - higher), jnp.exp(scores - higher)
        acc = acc * keep[..., None] + p[..., None] * values
        total, top = total * keep + p, higher
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return (acc / total[..., None]).astype(q.dtype), jnp.where(some, top + jnp.log(total), _FLOOR)


def _pull(
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    latest: Array,
    valid: Array,
    o: Array,
    lse: Array,
    do: Array,
) -> tuple[Float[Array, "S H K"], Float[Array, "M H K"], Float[Array, "M H K"], Float[Array, "H W"]]:
    """Gradients in one block; gathers and scores are made again, so that no distance keeps its own."""
    scale = q.shape[-1] ** -0.5
    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    dbias = []
    delta = jnp.sum(_fp32(do) * _fp32(o), -1)
    for back in range(bias.shape[1]):
        index, seen, keys, values = _at_distance(k, v, latest, valid, back)
        p = jnp.exp(_scores(q, keys, bias[:, back], seen) - lse)
        ds = jnp.where(seen[:, None], p * (jnp.sum(_fp32(do) * values, -1) - delta), 0.0)
        dbias.append(jnp.sum(ds, 0))
        ds = (ds * scale)[..., None]
        dq += ds * keys
        seen = seen[:, None, None]
        dk = dk.at[index].add(jnp.where(seen, ds * _fp32(q), 0.0), mode="drop")
        dv = dv.at[index].add(jnp.where(seen, p[..., None] * _fp32(do), 0.0), mode="drop")
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), jnp.stack(dbias, 1)


def _at_distance(
    k: Array, v: Array, latest: Array, valid: Array, back: int
) -> tuple[Int[Array, "S"], Bool[Array, "S"], Float[Array, "S H K"], Float[Array, "S H K"]]:
    """Index of the key so far back, whether it is visible, and key and value in fp32; zeros where it is not."""
    index = jnp.maximum(latest - back, 0)
    seen = (latest >= back) & valid[index]
    here = seen[:, None, None]
    return index, seen, jnp.where(here, _fp32(k[index]), 0.0), jnp.where(here, _fp32(v[index]), 0.0)


def _scores(q: Array, keys: Array, bias: Float[Array, "H"], seen: Bool[Array, "S"]) -> Float[Array, "S H"]:
    scores = jnp.sum(_fp32(q) * keys, -1) * q.shape[-1] ** -0.5 + _fp32(bias)[None]
    return jnp.where(seen[:, None], scores, _LOWEST)


def _fp32(x: Array) -> Array:
    return x.astype(jnp.float32)
