"""Rows cut into stretches that run side by side: a program a row and head leaves a GPU idle where there are few.

What a stretch does to the state that enters it is known without running it (`summary.py`). So one product and a scan
over stretches give every state that enters, and the stretches are rows of one call. Backward, gradients by states come
back over the stretches in the same way. Devices that share a sequence do likewise.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import Device
from pallas_kernels._linear_state.chunks import fit_chunk
from pallas_kernels._linear_state.tokens import count_documents
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.gated_linear_attention import hopper
from pallas_kernels.gated_linear_attention.summary import (
    gated_linear_attention_adjoint,
    gated_linear_attention_summary,
)

PROGRAMS = 132
"""The programs that an H100 or H200 runs at a time: one a multiprocessor."""
LEAST_STEPS = 512
"""The least steps of a stretch: below, the product and the scan over stretches would be most of the work. One row of
two such stretches is faster in `xla` forward, but not with gradients.
"""
TIMED_KEYS = 128
"""The most channels of a key that were timed."""
TIMED_STRETCHES = 16
"""The fewest stretches of a row under gates per head and per key channel: such rows, with heads of 128, were timed."""


def count_stretches(k: Any, v: Any, *, by_key: bool) -> int:
    """Count stretches a row, so that no more programs are made than run at a time.

    It is 1 for rows that are many or short.
    """
    batch, length, heads, values = v.shape
    keys, values = hopper.filled_keys(k.shape[3]), hopper.filled_values(values)
    pieces = values // hopper.program_values(keys, values, by_key=by_key) * -(-keys // hopper.WIDTHS[-1])
    programs = batch * heads * pieces
    return max(1, min(PROGRAMS // programs, length // LEAST_STEPS))


def why_not(
    device: Device, q: Any, k: Any, v: Any, *, log_key_gate: Any = None, **options: Any
) -> str | None:
    """Return why rows are not cut for the Hopper kernels, or None."""
    del options
    by_key = log_key_gate is not None
    if refused := hopper.why_not_heads(device, q, k, v, by_key=by_key):
        return refused
    batch, length, heads, _ = v.shape
    if (count := count_stretches(k, v, by_key=by_key)) == 1:
        return f"{batch} rows of {length} steps with {heads} heads are run whole"
    return hopper.why_not_steps(-(-length // count))


def rather_not(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    *,
    log_key_gate: Any = None,
    log_value_gate: Any = None,
    **options: Any,
) -> str | None:
    """Return why a call is left to others, or None.

    It was timed as slots are written, and in many stretches of wide heads.
    """
    gates = {"log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    if refused := hopper.rather_not(device, q, k, v, **gates, **options):
        return refused
    count = count_stretches(k, v, by_key=log_key_gate is not None)
    heads = k.shape[3], v.shape[3]
    if log_value_gate is None and (count < TIMED_STRETCHES or heads != (TIMED_KEYS, TIMED_KEYS)):
        return (
            f"without gates per value channel {TIMED_STRETCHES} stretches of heads of {TIMED_KEYS} channels were "
            f"timed, not {count} of {heads[0]} and {heads[1]}"
        )
    if k.shape[3] > TIMED_KEYS:
        return f"it was timed with keys of up to {TIMED_KEYS} channels, got {k.shape[3]}"
    return None


def in_stretches(
    run: Callable[..., Any],
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    *,
    count: int | None = None,
    log_gate: Float[Array, "B T H"] | None = None,
    log_key_gate: Float[Array, "B T J K"] | None = None,
    log_value_gate: Float[Array, "B T H V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    chunk_size: int = 64,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Compute `gated_linear_attention` in stretches of each row, by `run`.

    Args:
      run: implementation that stretches run by.
      count: stretches a row, fewer where they would not hold a chunk each; `count_stretches` if None.
    """
    gates = {"log_gate": log_gate, "log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    name, gate = next(((n, g) for n, g in gates.items() if g is not None), ("log_gate", None))
    if gate is None:
        gate = jnp.zeros(v.shape[:3], jnp.float32)
    batch, length, heads, values = v.shape
    count = count_stretches(k, v, by_key=log_key_gate is not None) if count is None else count
    chunk_size = fit_chunk(length, chunk_size)
    steps = -(-length // (count * chunk_size)) * chunk_size
    state = initial_state
    if state is None:
        state = jnp.zeros((batch, heads, k.shape[3], values), jnp.float32)
    ids = None if segment_ids is None else _filled(segment_ids, steps)
    arrays = vary_alike(*(_filled(z, steps) for z in (q, k, v, gate)), state, ids)
    found: Any = _attend(run, steps, name, scale, chunk_size, *arrays)
    o, final = found[0][:, :length], found[1]
    return (o, final) if output_final_state else o


def _filled(z: Array, steps: int) -> Array:
    """Fill rows up to whole stretches: behind the row nothing is written and nothing decays."""
    return jnp.pad(z, ((0, 0), (0, -z.shape[1] % steps), *((0, 0),) * (z.ndim - 2)))


@partial(OwnGradient, nondiff_argnums=(0, 1, 2, 3, 4))
def _attend(
    run: Callable[..., Any],
    steps: int,
    name: str,
    scale: float,
    chunk_size: int,
    q: Array,
    k: Array,
    v: Array,
    gate: Array,
    state: Array,
    ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    return _attend_fwd(run, steps, name, scale, chunk_size, q, k, v, gate, state, ids)[0]


def _attend_fwd(run: Any, steps: int, name: str, scale: float, chunk_size: int, *arrays: Any) -> Any:
    q, k, v, gate, state, ids = arrays
    cut = partial(_cut, steps=steps)
    decay, left = gated_linear_attention_summary(cut(k), cut(v), segment_ids=cut(ids), **{name: cut(gate)})

    def step(state: Array, effect: tuple[Array, ...]) -> tuple[Array, Array]:
        decay, left, same = effect
        enters = jnp.where(same, state, 0)
        return decay * enters + left, enters

    batch = v.shape[0]
    effects = (_in_turn(decay, batch), _in_turn(left, batch), _continues(ids, v, steps))
    _, entering = lax.scan(step, state.astype(left.dtype), effects)
    entering = _side_by_side(entering)
    attend = _of_stretches(run, name, scale, chunk_size, entering, cut(ids))
    o, finals = attend(*(cut(z) for z in (q, k, v, gate)))
    final = _in_turn(finals, batch)[-1]
    return (o.reshape(v.shape), final), (*arrays, entering)


def _attend_bwd(
    run: Any, steps: int, name: str, scale: float, chunk_size: int, kept: Any, cotangents: Any
) -> Any:
    q, k, v, gate, state, ids, entering = kept
    cut, batch = partial(_cut, steps=steps), v.shape[0]
    do = cut(cotangents[0])
    options: dict[str, Any] = {"segment_ids": cut(ids), "scale": scale, name: cut(gate)}
    decay, read = gated_linear_attention_adjoint(cut(q), do, **options)

    def step(behind: Array, effect: tuple[Array, ...]) -> tuple[Array, Array]:
        decay, read, same = effect
        return jnp.where(same, decay * behind + read, 0), behind

    effects = (_in_turn(decay, batch), _in_turn(read, batch), _continues(ids, v, steps))
    dstate, behind = lax.scan(step, cotangents[1].astype(read.dtype), effects, reverse=True)
    attend = _of_stretches(run, name, scale, chunk_size, entering, cut(ids))
    (_, finals), pull = jax.vjp(attend, *(cut(z) for z in (q, k, v, gate)))
    found = pull((do, _side_by_side(behind).astype(finals.dtype)))
    gradients = (d.reshape(z.shape) for d, z in zip(found, (q, k, v, gate), strict=True))
    return *gradients, dstate.astype(state.dtype), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _of_stretches(
    run: Any, name: str, scale: float, chunk_size: int, entering: Array, ids: Array | None
) -> Callable[..., tuple[Array, Array]]:
    """Return a function of q, k, v and gate to outputs and final states of stretches."""

    def attend(q: Array, k: Array, v: Array, gate: Array) -> tuple[Array, Array]:
        options: dict[str, Any] = {"segment_ids": ids, "scale": scale, "chunk_size": chunk_size, name: gate}
        return run(q, k, v, initial_state=entering, output_final_state=True, **options)

    return attend


def _cut(z: Array | None, steps: int) -> Any:
    """Cut [B, T, ...] into rows of `steps` [B N, steps, ...]."""
    return None if z is None else z.reshape(-1, steps, *z.shape[2:])


def _in_turn(z: Float[Array, "BN ..."], batch: int) -> Float[Array, "N B ..."]:
    return jnp.moveaxis(z.reshape(batch, -1, *z.shape[1:]), 1, 0)


def _side_by_side(z: Float[Array, "N B ..."]) -> Float[Array, "BN ..."]:
    return jnp.moveaxis(z, 0, 1).reshape(-1, *z.shape[2:])


def _continues(
    ids: Int[Array, "B T"] | None, v: Float[Array, "B T H V"], steps: int
) -> Bool[Array, "N B 1 1 1"]:
    """Return whether a stretch's first document is that of the state which enters it.

    A stretch of padding lets the state through.
    """
    batch, length = v.shape[:2]
    if ids is None:
        return jnp.ones((length // steps, batch, 1, 1, 1), bool)
    begun = count_documents(ids)
    before = jnp.pad(begun[:, steps - 1 : -1 : steps], ((0, 0), (1, 0)))
    there = (ids != 0).reshape(batch, -1, steps)
    first = jnp.argmax(there, -1)
    of_first = jnp.take_along_axis(begun.reshape(there.shape), first[..., None], -1)[..., 0]
    return ((of_first == before) | ~there.any(-1)).T[:, :, None, None, None]
