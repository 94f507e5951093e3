"""Attention of one new token a row: its heads are rotated, written to a cache, and attend to what the cache holds.

The output is in parts, each of some slots, with their log-sum-exps: the product behind attention merges them while it
reads (`pallas_kernels.token_product`).
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import _dispatch
from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.attention import prefix_why
from pallas_kernels.attention.masks import EMPTY_LSE
from pallas_kernels.attention.token_parts import EMPTY, MOST_SLOTS, STEP, TURN, count_parts, oldest


class TokenAttention(NamedTuple):
    """Outputs in P parts with their log-sum-exps, and the cache after the token."""

    o: Float[Array, "P B H K"]
    lse: Float[Array, "P B H"]
    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G K"]
    times: Int[Array, "B S"]


def _reference(
    heads: Array, k: Array, v: Array, times: Array, marks: Array, frequencies: Any, **options: Any
) -> TokenAttention:
    """Compute it a step at a time."""
    (rows, slots, groups, width), dtype = k.shape, options["dtype"]
    positions, now, kept, fresh = marks.T
    joined = jnp.sum(heads, 0).astype(dtype).reshape(rows, -1, width)
    q, own_k, own_v = jnp.split(joined, (-2 * groups, -groups), 1)
    if frequencies is not None:
        q, own_k = (_turn(x, positions, frequencies) for x in (q, own_k))
    slot = jnp.where(kept > 0, now % slots, slots)
    times = jnp.where(fresh[:, None] > 0, EMPTY, times)
    write = jax.vmap(lambda old, i, new: old.at[i].set(new.astype(old.dtype), mode="drop"))
    k, v, times = (write(*each) for each in ((k, slot, own_k), (v, slot, own_v), (times, slot, now)))
    seen = (times > oldest(now, options["window"])[:, None]) & (kept > 0)[:, None]
    here = _part_of_slots(marks, slots, count_parts(rows * groups, slots))
    seen = (seen[None] & here)[:, :, None, None]
    by_group = q.reshape(rows, groups, -1, width).astype(jnp.float32)
    wide = (x.astype(dtype).astype(jnp.float32) for x in (k, v))
    keys, values = (jnp.where((times >= 0)[..., None, None], x, 0) for x in wide)
    scores = jnp.einsum("bghk,bsgk->bghs", by_group, keys) * options["scale"]
    scores = jnp.where(seen, scores[None], EMPTY_LSE)
    top = jnp.max(scores, -1)
    p = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    total = jnp.sum(p, -1)
    safe = jnp.where(total > 0, total, 1)
    o = jnp.einsum("pbghs,bsgk->pbghk", p, values) / safe[..., None]
    lse = jnp.where(total > 0, top + jnp.log(safe), EMPTY_LSE)
    return TokenAttention(o.reshape(-1, *q.shape), lse.reshape(-1, *q.shape[:2]), k, v, times)


def _part_of_slots(marks: Int[Array, "B 4"], slots: int, parts: int) -> Bool[Array, "P B S"]:
    """Return whether a part holds a slot: equal runs of the filled ones, and the token's own in the first."""
    _, now, kept, fresh = marks.T
    filled = jnp.where((kept > 0) & (fresh == 0), jnp.minimum(now + 1, slots), 0)
    length = jnp.maximum(-(-filled // (parts * STEP)), 1) * STEP
    at = jnp.arange(slots, dtype=jnp.int32)[None]
    part = jnp.where(at == (now % slots)[:, None], 0, at // length[:, None])
    return part[None] == jnp.arange(parts, dtype=jnp.int32)[:, None, None]


def _turn(x: Float[Array, "B H K"], positions: Int[Array, "B"], frequencies: UInt32[Array, "F"]) -> Array:
    """Turn pairs of channels half a head apart by position times frequency."""
    phase = positions[:, None].astype(jnp.uint32) * frequencies[None]
    angles = jax.lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * jnp.float32(TURN)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _triton(*arrays: Any, **options: Any) -> TokenAttention:
    return _run(tuple(sorted(options.items())), *arrays)


@partial(OwnGradient, nondiff_argnums=(0,))
def _run(options: Any, *arrays: Any) -> TokenAttention:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.attention import triton_token

    return TokenAttention(*triton_token.token_attention(*arrays, **dict(options)))


def _keep(options: Any, *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
    return _run(options, *arrays), arrays


def _gradients(options: Any, arrays: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    heads, k, v, *marks = arrays

    def run(heads: Array, k: Array, v: Array) -> Any:
        return _reference(heads, k, v, *marks, **dict(options))

    return *jax.vjp(run, heads, k, v)[1](dy), None, None, None


_run.defvjp(_keep, _gradients)


def why_not(device: Device, heads: Any, k: Any, v: Any, times: Any, *_: Any, **options: Any) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    rows, slots, groups, width = k.shape
    count = heads.shape[2] // width - 2 * groups
    q = jax.ShapeDtypeStruct((rows, 1, count, width), options["dtype"])
    if (reason := prefix_why.why_not(device, q, k, v, None, times)) is not None:
        return reason
    if slots > MOST_SLOTS:
        return f"it reads caches of at most {MOST_SLOTS} slots, this one has {slots}"
    return None


TABLE = (
    Implementation("triton", _triton, why_not),
    Implementation("reference", _reference),
)
"""Fastest first."""


@checked
def token_attention(
    heads: Float[Array, "P B N"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    times: Int[Array, "B S"],
    marks: Int[Array, "B 4"],
    frequencies: UInt32[Array, "F"] | None = None,
    *,
    dtype: Any,
    window: int | None = None,
    scale: float | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> TokenAttention:
    """Write one token a row to a cache and attend to what the cache then holds, in parts.

    The output of a head is sum_p softmax_p(lse)_p o_p, and 0 if all lse are EMPTY_LSE. Cache arrays that are donated
    are written in place.

    Args:
      heads: queries of H heads, then keys and values of G heads each, in parts whose sum they are: N = (H + 2 G) K.
      k: keys of a cache, position encoding applied; H is a multiple of G.
      v: its values.
      times: of the token in each slot; -1 for none. The token of time t goes to slot t mod S.
      marks: of each row the token's position and its time in the document, and then two flags: whether there is a
        token, and whether a new document empties the cache. Without a token nothing is seen, and no key written.
      frequencies: phase that each pair of channels turns a position, in 2^-32 turns: K / 2 of them. None turns nothing.
      dtype: of queries, keys and values: sums of parts are rounded to it.
      window: number of steps that a token sees, its own included; None for all.
      scale: of the scores; K**-0.5 if None.
      implementation: which to run; the best for the device and these arguments if None.

    Raises:
      ValueError: shapes do not fit together, or the implementation cannot run this here.

    Source: RoFormer (2104.09864, section 3.4.2) for the rotation; Flash-Decoding (Dao et al. 2023) for the parts.
    """
    arrays = (heads, k, v, times, marks, frequencies)
    _check(*arrays)
    options: dict[str, Any] = {"dtype": dtype, "window": window}
    options["scale"] = float(k.shape[3] ** -0.5 if scale is None else scale)
    device = _dispatch.current_device()
    return _dispatch.choose("token_attention", TABLE, implementation, device, *arrays, **options).run(
        *arrays, **options
    )


def _check(heads: Any, k: Any, v: Any, times: Any, marks: Any, frequencies: Any) -> None:
    rows, slots, groups, width = k.shape
    count = heads.shape[2] // width - 2 * groups
    if v.shape != k.shape or heads.shape[1] != rows or heads.shape[2] % width or count < 1 or count % groups:
        raise ValueError(
            f"token_attention: expected heads [P, B, (H + 2 G) K] and k, v of one shape [B, S, G, K] with H a multiple "
            f"of G, got {heads.shape}, {k.shape}, {v.shape}"
        )
    if (times.shape, marks.shape) != ((rows, slots), (rows, 4)):
        raise ValueError(
            f"token_attention: expected times {(rows, slots)} and marks {(rows, 4)}, got {times.shape} and "
            f"{marks.shape}"
        )
    if frequencies is not None and frequencies.shape != (width // 2,):
        raise ValueError(f"token_attention: expected {width // 2} frequencies, got {frequencies.shape}")


def writes_token(like: Any, k: Any) -> bool:
    """Check whether the kernel of `token_attention` runs here for one token q [B, 1, H, K] and a cache, or shapes."""
    if _dispatch.has_reference_ops():
        return False
    heads = jax.ShapeDtypeStruct((1, k.shape[0], (like.shape[2] + 2 * k.shape[2]) * k.shape[3]), jnp.float32)
    return TABLE[0].cannot_run(_dispatch.current_device(), heads, k, k, None, dtype=like.dtype) is None
