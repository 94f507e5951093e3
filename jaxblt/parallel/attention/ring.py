"""Ring attention: keys and values pass from device to device while each attends with its own queries.

Device i starts with its own keys and passes on the keys that it holds, so at step s it meets those of device i - s.
Partial results merge by log-sum-exp in fp32. The backward pass is a second ring that makes the scores again from the
merged log-sum-exp. Gradients of keys travel with their keys from the second device on, and a device adds its own share
when they are back. All devices run one program without branches. In the zig-zag layout two of the four half-by-half
squares of a step are visible on every device, and an index says which two. So a causal mask leaves no device idle.
Source: Liu, Zaharia, Abbeel, Ring Attention, 2310.01889; Brandon et al., Striped Attention, 2311.09431, for
balancing the causal mask.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxblt.parallel.attention.plan import Plan
from jaxblt.parallel.attention.tiles import Keys, Tile, add_at, attend, tile_gradients
from jaxblt.parallel.layout import in_zigzag
from pallas_kernels.attention import Partial
from pallas_kernels.runtime import OwnGradient

SAVED_OUT, SAVED_LSE = "ring_out", "ring_lse"
"""`checkpoint_name`s of what the backward pass needs: recomputing them would repeat the ring pass."""

MERGED_AT_ONCE = 2**15
"""The most tokens of a device for which the compiler may keep the outputs of all steps (backward their parts of dq) and
merge them in one pass over memory. With more tokens single passes are small beside the kernels, and the kept arrays are
not."""


def partial_in_layout(plan: Plan, q: Float[Array, "B T H K"], keys: Keys) -> Partial:
    """Return `partial_ring_attention` of tokens that come in the order of the sequence."""

    def by_token(q: Array, keys: Keys) -> tuple[Array, Array]:
        o, lse = partial_ring_attention(plan, q, keys)
        return o, lse.swapaxes(1, 2)

    o, lse = in_zigzag(by_token, q, keys, axis=plan.devices, swaps=plan.swaps)
    return Partial(o, lse.swapaxes(1, 2))


def shift[T](plan: Plan, held: T) -> T:
    """Return what the device before this one holds."""
    n = plan.devices.size
    return lax.ppermute(held, plan.devices.name, [(i, (i + 1) % n) for i in range(n)])


def ring_tiles(
    plan: Plan, step: int, length: int, device: Int[Array, ""], *, apart: bool = False, between: bool = False
) -> list[Tile]:
    """Return what a device, given by its index, has to do at a step; at step 0 it meets its own keys.

    Args:
      apart: each half of a zig-zag stretch may have a length of its own, so that step 0 is two calls: both halves by
        themselves, and the later one with the keys of the earlier one. Otherwise it is one causal call.
      between: only tiles in which different runs meet, as `packed_ring` wants them.
    """
    if between:
        tiles = ring_tiles(plan, step, length, device, apart=True)
        return [tile._replace(shared=True) for tile in tiles if not tile.causal]
    whole, half = Tile(0, 0, length, causal=False), length // 2
    if step == 0 and apart and plan.runs == 2:
        return [Tile(0, 0, half, causal=True, each=2), Tile(half, 0, half, causal=False)]
    if step == 0 or not plan.causal:
        return [whole._replace(causal=plan.causal)]
    before = device >= step
    if plan.runs == 1:
        return [whole._replace(live=before)]
    start = jnp.where(before, 0, half)
    return [Tile(half, 0, half, causal=False), Tile(start, start, half, causal=False)]


def _at_once(plan: Plan, step: int, length: int, device: Int[Array, ""]) -> list[Tile]:
    """Return the tiles of a step as one: each run of queries sees as many of the keys, from their first on."""
    before = device >= step
    run = length // plan.runs
    reaches = tuple(jnp.where(before, run, i * length) for i in range(plan.runs))
    return [Tile(0, 0, length, causal=False, reaches=reaches)]


def partial_ring_attention(
    plan: Plan,
    q: Float[Array, "B T H K"],
    keys: Keys,
    merged: Partial | None = None,
    *,
    cast_output: bool = False,
    between: bool = False,
) -> Partial:
    """Return `ring_attention` with its log-sum-exp, merged into an earlier result; not differentiable.

    The output is in fp32. With `cast_output`, where nothing else is merged into it, it is in q's dtype if the kernel of
    the last step merges and casts in one.
    """
    kv, ids, device = _pair(keys.k, keys.v), keys.segment_ids, lax.axis_index(plan.devices.name)
    lengths, n = _lengths(plan, keys), plan.devices.size
    for step in range(n):
        coming = shift(plan, (kv, ids)) if step + 1 < n else (kv, ids)
        tiles = ring_tiles(plan, step, q.shape[1], device, apart=keys.lengths is not None, between=between)
        options = plan.options
        if step and plan.merges:
            # Avoid cutting out half of what was merged and putting it back.
            tiles = _at_once(plan, step, q.shape[1], device)
            options = options | {"cast_output": cast_output and step + 1 == n}
        held = _held(kv, ids, lengths, (device - step) % n)
        for tile in tiles:
            merged = attend(tile, q, keys.segment_ids, held, options, merged)
        assert merged is not None
        # Keep the next exchange behind this step's kernel: without the barrier XLA hoists all exchanges to the front
        # and waits for each. Tie the device's index too, or XLA slices every step's queries early. Leave out the
        # log-sum-exp of a kernel that merges: its runs would be put in a row and taken apart again.
        tied = "o" if plan.merges or q.shape[1] > MERGED_AT_ONCE else "lse"
        (kv, ids), value, device = lax.optimization_barrier((coming, getattr(merged, tied), device))
        merged = merged._replace(**{tied: value})
    assert merged is not None
    return merged


def _lengths(plan: Plan, keys: Keys) -> Int[Array, "P B R"] | None:
    """Return the lengths of every device's runs: a few numbers, for which no step has to wait then."""
    return None if keys.lengths is None else lax.all_gather(keys.lengths, plan.devices.name)


def _held(kv: Array, ids: Array | None, lengths: Array | None, owner: Int[Array, ""]) -> Keys:
    return Keys(kv[0], kv[1], ids, None if lengths is None else lengths[owner])


def _primal(plan: Plan, q: Float[Array, "B T H K"], keys: Keys) -> Float[Array, "B T H K"]:
    return partial_ring_attention(plan, q, keys, cast_output=True).o.astype(q.dtype)


def _forward(plan: Plan, q: Array, keys: Keys) -> tuple[Array, Any]:
    o, lse = partial_ring_attention(plan, q, keys, cast_output=True)
    o = checkpoint_name(o.astype(q.dtype), SAVED_OUT)
    return o, (q, keys, Partial(o, checkpoint_name(lse, SAVED_LSE)))


def _backward(plan: Plan, saved: Any, do: Float[Array, "B T H K"]) -> tuple[Array, Keys]:
    q, keys, merged = saved
    dq, dk, dv = ring_gradients(plan, q, keys, merged, do)
    return dq, Keys(dk, dv, None)


def ring_gradients(
    plan: Plan,
    q: Float[Array, "B T H K"],
    keys: Keys,
    merged: Partial,
    do: Float[Array, "B T H K"],
    start: tuple[Array, Array, Array] | None = None,
    *,
    between: bool = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Return dq, dk and dv, summed in fp32, with those of `start`.

    Keys travel a step ahead of their gradients, in one message. A device computes the last tile of its own keys at the
    end, while the gradients that other devices have summed arrive.
    """
    # Keep the first exchange in the backward pass: in the forward pass XLA may have nothing to hide it behind.
    k, v, lse, do = lax.optimization_barrier((keys.k, keys.v, merged.lse, do))
    merged = merged._replace(lse=lse)
    own, lengths, n = keys._replace(k=k, v=v), _lengths(plan, keys), plan.devices.size
    kv, ids, device = _pair(k, v), keys.segment_ids, lax.axis_index(plan.devices.name)
    length, own_tiles = q.shape[1], ring_tiles(plan, 0, q.shape[1], device, apart=True, between=between)
    dq, dkv = (jnp.zeros_like(x, jnp.float32) for x in (q, kv))
    dq = dq if start is None else start[0].astype(jnp.float32)
    kept: list[tuple[Any, Any]] = []
    for step in range(n + 1):
        if own_keys := step in (0, n):
            held, tiles = own, own_tiles[-1:] if step else own_tiles[:-1]
        else:
            held, tiles = (
                _held(kv, ids, lengths, (device - step) % n),
                ring_tiles(plan, step, length, device, between=between),
            )
        sent = [kv] * (step + 1 < n) + [dkv] * (step > 1)
        # Start no kernel before the message is ready, or XLA may have nothing left to send it beside.
        message, lse = lax.optimization_barrier((_pack(sent) if sent else None, merged.lse))
        merged = merged._replace(lse=lse)
        coming = shift(plan, (message, ids if step + 1 < n else None)) if sent else None
        gradients = []
        for tile in tiles:
            found = tile_gradients(tile, q, keys.segment_ids, held, merged, do, plan.options)
            if length > MERGED_AT_ONCE:
                # Run one after the other, or what is cut out for all of them is there at once.
                found, q, merged, do, dq = lax.optimization_barrier((found, q, merged, do, dq))
            dq = add_at(dq, found[0], tile.q_start, 1)
            gradients.append(found[1:])
        coming, gradients, device = lax.optimization_barrier((coming, gradients, device))
        if coming is not None:
            came, ids = _unpack(coming[0], sent), coming[1]
            kv, dkv = came[0] if step + 1 < n else kv, came[-1] if step > 1 else dkv
        for tile, add in zip(tiles, gradients, strict=True):
            if own_keys:
                kept.append((tile.k_start, jnp.stack(add)))
            else:
                dkv = add_at(dkv, jnp.stack(add), tile.k_start, 2)
    for at, add in kept if start is None else [(0, jnp.stack(start[1:])), *kept]:
        dkv = add_at(dkv, add, at, 2)
    dk, dv = dkv.astype(k.dtype)
    return dq.astype(q.dtype), dk, dv


def _pair(k: Array, v: Array) -> Array:
    """Return jnp.stack((k, v)), as a copy of one axis: 17 us for 41 where each is 16 MiB (jax 0.11.2, one H200)."""
    return jnp.concatenate((k.reshape(-1), v.reshape(-1))).reshape(2, *k.shape)


def _pack(arrays: list[Array]) -> Array:
    """Pack the bits of all in one array, one after the other: the compiler overlaps one exchange at a time.

    As integers: a backend may send narrow floats as wide ones, and half of an fp32 number can look like a NaN.
    """
    dtype = jnp.dtype(f"uint{8 * min(x.dtype.itemsize for x in arrays)}")
    row = arrays[0].shape[1:]
    return jnp.concatenate([lax.bitcast_convert_type(x, dtype).reshape(-1, *row) for x in arrays])


def _unpack(packed: Array, like: list[Array]) -> list[Array]:
    rows = [len(x) * x.dtype.itemsize // packed.dtype.itemsize for x in like]
    chunks = jnp.split(packed, np.cumsum(rows)[:-1])
    return [_from_bits(chunk, x) for chunk, x in zip(chunks, like, strict=True)]


def _from_bits(bits: Array, like: Array) -> Array:
    ratio = like.dtype.itemsize // bits.dtype.itemsize
    shape = like.shape if ratio == 1 else (*like.shape, ratio)
    return lax.bitcast_convert_type(bits.reshape(shape), like.dtype)


ring_attention = OwnGradient(_primal, nondiff_argnums=(0,))
"""(ring, q, keys) -> o, all of this device: exact attention to the keys of all devices. Call it in an island."""
ring_attention.defvjp(_forward, _backward)
