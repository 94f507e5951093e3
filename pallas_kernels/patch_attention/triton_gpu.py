"""Hopper, in Triton: both directions and their gradients, one kernel a pass.

Patches of a block and their bytes are both in order, so that a program which owns some patches walks over an interval
of bytes. Each pass reads its arrays once from memory and writes each result once; scores are made again, and nothing is
saved but the inputs and what `lookup`'s softmax divides by.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.patch_attention import triton_lookup, triton_pool
from pallas_kernels.patch_attention.triton_edges import find_edges


def pool(
    q: Float[Array, "B N P H K"],
    k: Float[Array, "B N S H K"],
    v: Float[Array, "B N S H K"],
    patch_ids: Int[Array, "B N S"],
    *,
    interpret: bool = False,
) -> Float[Array, "B N P H K"]:
    """Compute `pool`; what `hopper.why_not` refuses is not checked again.

    Args:
      interpret: run on the CPU, for tests.
    """
    q, k, v, patch_ids = vary_alike(q, k, v, patch_ids)
    ids = patch_ids.reshape(-1, patch_ids.shape[-1])
    ends = jnp.full(len(ids), ids.shape[1], jnp.int32)
    ids, ends = vary_alike(ids, ends)
    edges = find_edges(ids, ends, q.shape[2], interpret=interpret)
    o: Any = _pool(_rows(q), _rows(k), _rows(v), edges, interpret)
    return o.reshape(q.shape)


def lookup(
    q: Float[Array, "B N S H K"],
    k: Float[Array, "B N M H K"],
    v: Float[Array, "B N M H K"],
    latest: Int[Array, "B N S"],
    valid: Bool[Array, "B N M"],
    bias: Float[Array, "H W"],
    *,
    look_back: int,
    interpret: bool = False,
) -> Float[Array, "B N S H K"]:
    """Compute `lookup`; what `hopper.why_not` refuses is not checked again."""
    del look_back  # The width of `bias`, as the caller checked.
    q, k, v, latest, valid, bias = vary_alike(q, k, v, latest, valid, bias)
    latest, valid = (x.reshape(-1, x.shape[-1]) for x in (latest, valid))
    # Sort bytes after the last one that sees a patch behind all others, as those before it stand before them.
    ends = jnp.max(jnp.where(latest >= 0, jnp.arange(1, latest.shape[1] + 1, dtype=jnp.int32), 0), axis=1)
    edges = find_edges(latest, ends, valid.shape[1], interpret=interpret)
    marks = (latest, valid, bias.astype(jnp.float32), edges)
    o: Any = _lookup(_rows(q), _rows(k), _rows(v), *marks, interpret)
    return o.reshape(q.shape)


def _rows(x: Float[Array, "B N L H K"]) -> Float[Array, "R H K"]:
    return x.reshape(-1, *x.shape[3:])


@partial(OwnGradient, nondiff_argnums=(4,))
def _pool(q: Array, k: Array, v: Array, edges: Array, interpret: bool) -> Array:
    return triton_pool.forward(q, k, v, edges, interpret=interpret)


def _pool_forward(*args: Any) -> tuple[Any, Any]:
    return _pool(*args), args[:-1]


def _pool_backward(interpret: bool, saved: Any, do: Array) -> tuple[Any, ...]:
    q, k, v, edges = saved
    return *triton_pool.backward(q, k, v, edges, do, interpret=interpret), None


_pool.defvjp(_pool_forward, _pool_backward)


@partial(OwnGradient, nondiff_argnums=(7,))
def _lookup(
    q: Array, k: Array, v: Array, latest: Array, valid: Array, bias: Array, edges: Array, interpret: bool
) -> Array:
    return triton_lookup.forward(q, k, v, latest, valid, bias, edges, interpret=interpret)[0]


def _lookup_forward(*args: Any) -> tuple[Any, Any]:
    *arrays, interpret = args
    o, sums = triton_lookup.forward(*arrays, interpret=interpret)
    return o, (*arrays, sums)


def _lookup_backward(interpret: bool, saved: Any, do: Array) -> tuple[Any, ...]:
    q, k, v, latest, valid, bias, edges, sums = saved
    marks = (latest, valid, bias, edges, sums)
    dq, dk, dv, dbias = triton_lookup.backward(q, k, v, *marks, do, interpret=interpret)
    return dq, dk, dv, None, None, dbias, None


_lookup.defvjp(_lookup_forward, _lookup_backward)
