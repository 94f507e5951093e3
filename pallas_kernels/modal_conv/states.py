"""The states that chunks hand on, read and leave behind; all in the accumulator's dtype."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._conv.packed import keep, same_document
from pallas_kernels.linear_scan import linear_scan
from pallas_kernels.modal_conv.filter import powers


def _mix(equation: str, weights: Array, x: Array) -> Array:
    """Multiply in the weights' dtype.

    If x carries 8 bits, TF32 keeps more than x has; else nothing is dropped.
    """
    precision = lax.Precision.HIGHEST if jnp.finfo(x.dtype).bits >= 32 else lax.Precision.HIGH
    return jnp.einsum(equation, weights, x.astype(weights.dtype), precision=precision)


def _edges(ids: Int[Array, "B N C"]) -> Int[Array, "B N 1"]:
    """Return the document whose state enters each chunk: that of the step before.

    For the first chunk it is that of its first step.
    """
    return jnp.concatenate([ids[:, :1, :1], ids[:, :-1, -1:]], 1)


def entering_states(
    blocks: Float[Array, "B D N C"],
    log_poles: Float[Array, "D M"],
    ids: Int[Array, "B N C"] | None,
    state: Float[Array, "B D M"] | None,
    *,
    one_document_per_chunk: bool,
) -> Float[Array, "B D N M"]:
    """Return the state before each chunk, of the document that lies before its edge."""
    count, chunk = blocks.shape[2:]
    if count == 1 and state is not None:
        return state[:, :, None]
    sent = blocks
    if ids is not None and not one_document_per_chunk:
        sent = keep(same_document(ids, ids[..., -1:]), blocks)
    ages = powers(log_poles, chunk - 1 - jnp.arange(chunk))
    written = _mix("dmj,bdnj->bdnm", ages, sent)[:, :, :-1]
    first = jnp.zeros_like(written[:, :, :1]) if state is None else state[:, :, None]
    decays = jnp.broadcast_to(jnp.exp(log_poles * chunk)[None, :, None], (1, *written.shape[1:]))
    if ids is not None:
        edges = _edges(ids)
        stays = edges[:, 1:] == edges[:, :-1]
        decays = keep(stays[:, None], decays)
    decays = jnp.pad(decays, ((0, 0), (0, 0), (1, 0), (0, 0)))
    return linear_scan(decays, jnp.concatenate([first, written], 2))


def read_states(
    entering: Float[Array, "B D N M"],
    log_poles: Float[Array, "D M"],
    residues: Float[Array, "D M"],
    ids: Int[Array, "B N C"] | None,
    *,
    like: Float[Array, "B D N C"],
) -> Float[Array, "B D N C"]:
    """Return what each step gets from the state before its chunk, if its document is the same."""
    chunk = like.shape[-1]
    weights = residues[:, :, None] * powers(log_poles, 1 + jnp.arange(chunk))
    precision = lax.Precision.HIGHEST if jnp.finfo(like.dtype).bits >= 32 else lax.Precision.HIGH
    y = jnp.einsum("dmi,bdnm->bdni", weights, entering, precision=precision)
    return y if ids is None else keep(same_document(ids, _edges(ids)), y)


def final_state(
    u: Float[Array, "B D T"],
    log_poles: Float[Array, "D M"],
    documents: Int[Array, "B T"] | None,
    entering: Float[Array, "B D N M"] | None,
    state: Float[Array, "B D M"] | None,
    *,
    chunk: int,
) -> Float[Array, "B D M"]:
    """Return the state after each row's last step that is no padding.

    If there is none it is the state given, bit by bit. Each row's last chunk is read anew, up to that step, as the
    padding behind it would let the state decay.
    """
    batch, _, length = u.shape
    steps = jnp.arange(length, dtype=jnp.int32)[None]
    if documents is None:
        last = jnp.full((batch,), length - 1, jnp.int32)
    else:
        last = jnp.max(jnp.where(documents != 0, steps, -1), 1)
    end = jnp.maximum(last, 0)
    n, used = end // chunk, end % chunk + 1
    times = end[:, None] - (chunk - 1) + jnp.arange(chunk, dtype=jnp.int32)[None]
    within, times = times >= (n * chunk)[:, None], jnp.maximum(times, 0)
    document = None if documents is None else jnp.take_along_axis(documents, end[:, None], 1)
    if documents is not None:
        within &= jnp.take_along_axis(documents, times, 1) == document
    tail = keep(within[:, None], jnp.take_along_axis(u, times[:, None], 2))
    final = _mix("dmj,bdj->bdm", powers(log_poles, chunk - 1 - jnp.arange(chunk)), tail)
    if entering is not None:
        carried = jnp.take_along_axis(entering, n[:, None, None, None], 2)[:, :, 0]
        if documents is not None:
            before = jnp.where(n > 0, n * chunk - 1, 0)[:, None]
            carried = keep((jnp.take_along_axis(documents, before, 1) == document)[:, :, None], carried)
        final = final + jnp.exp(log_poles[None] * used[:, None, None].astype(log_poles.dtype)) * carried
    if documents is None:
        return final
    given = jnp.zeros_like(final) if state is None else state
    return jnp.where((last >= 0)[:, None, None], final, given)


def row_state(
    u: Float[Array, "B D T"], log_poles: Float[Array, "D M"], *, chunk: int = 128
) -> Float[Array, "B D M"]:
    """Return what a row of one document leaves behind from a state of zero.

    It is sum_t exp((T - 1 - t) log_poles) u_t. `final_state` without the chunks' states: one product, and a sum over
    chunks.
    """
    (u, log_poles), length = vary_alike(u, log_poles), u.shape[-1]
    log_poles = log_poles.astype(accumulator(u.dtype))
    blocks = jnp.pad(u, ((0, 0), (0, 0), (-length % chunk, 0))).reshape(*u.shape[:2], -1, chunk)
    written = _mix("dmj,bdnj->bdnm", powers(log_poles, chunk - 1 - jnp.arange(chunk)), blocks)
    count = blocks.shape[2]
    ages = powers(log_poles, chunk * (count - 1 - jnp.arange(count)))
    return jnp.einsum("dmn,bdnm->bdm", ages, written, precision=lax.Precision.HIGHEST)
