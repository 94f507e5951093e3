"""Ring attention to packed rows by lengths alone, which kernels know where they know no documents.

In runs of tokens with their content first and ids that rise along the row, two runs have at most one document in
common: that of the earlier one's last token and the later one's first. Its queries are a prefix of the later run, and
its keys a suffix of the earlier one's content, so a prefix of it read backwards; between different runs the order of
keys does not matter. Every run attends to its own keys as a packed row by itself. Rows whose ids do not rise are found
out on the devices, and all of them take the ring with segment ids then. A causal ring alone, since queries that see
later keys would have to be turned instead. What kernels leave beyond the lengths is hidden after each call.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxblt.parallel.attention.ring import SAVED_LSE, SAVED_OUT, Ring, partial_ring_attention, ring_gradients
from jaxblt.parallel.attention.tiles import Keys, Tile, attend, tile_gradients
from jaxblt.parallel.content import backwards
from pallas_kernels.attention import Partial, cudnn, masks
from pallas_kernels.runtime import OwnGradient, current_device, varying_axes


class _Between(Ring):
    """The tiles of a causal ring in which different runs meet."""

    def tiles(self, step: int, length: int, device: Int[Array, ""], *, apart: bool = False) -> list[Tile]:
        del apart
        tiles = super().tiles(step, length, device, apart=True)
        return [tile._replace(shared=True) for tile in tiles if not tile.causal]


def can_run_on_cudnn(ring: Ring, q: Any, k: Any) -> bool:
    """Whether packed rows run by lengths, for arrays or shapes of one device: where cuDNN can, unless another is named.

    Raises:
      ValueError: cuDNN is asked for by name and cannot run this, and why.
    """
    if ring.implementation not in (None, "cudnn"):
        return False
    rows, length = q.shape[0] * ring.runs, q.shape[1] // ring.runs
    q_run, k_run = (jax.ShapeDtypeStruct((rows, length, *x.shape[2:]), x.dtype) for x in (q, k))
    ids: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    mask = masks.CAUSAL & masks.documents(ids)
    reason = cudnn.why_not_partial(current_device(), q_run, k_run, k_run, mask)
    reason = reason if ring.causal else "queries that see later documents' keys have no such form"
    if reason is not None and ring.implementation is not None:
        raise ValueError(
            f"'cudnn' cannot run packed rows in this ring: {reason}; use implementation=None, or packed=False if each "
            "row is of one document"
        )
    return reason is None


def documents_rise(ring: Ring, ids: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Whether no id is less than one before it, in any row of any device; ids of content come first in every run."""
    runs = ids.reshape(ids.shape[0], ring.runs, -1)
    within = jnp.all((runs[..., 1:] <= 0) | (runs[..., 1:] >= runs[..., :-1]))
    ends = jnp.stack((runs[..., 0], jnp.max(runs, -1)))
    ends = lax.all_gather(ends, ring.axis.name, axis=2, tiled=True)
    stretches = ring.axis.size * ring.runs
    first, last = jnp.maximum(ends[..., np.argsort(ring.layout.order(stretches, ring.axis.size))], 0)
    between = jnp.all((first[:, 1:] == 0) | (first[:, 1:] >= lax.cummax(last, axis=1)[:, :-1]))
    # Over rows too: an exchange in a branch is one operation of all devices, of which no part may be missing.
    return lax.pmin((within & between).astype(jnp.int32), tuple(sorted(varying_axes(ids)))) > 0


def _own(ring: Ring, q: Array) -> Tile:
    return Tile(0, 0, q.shape[1] // ring.runs, causal=True, each=ring.runs, own=True)


def _between(ring: Ring) -> Ring:
    return _Between(**vars(ring))


def _turned(ring: Ring, keys: Keys) -> Keys:
    """Keys and values with the content of every run in reverse order, or back in order; ids stay."""
    assert keys.segment_ids is not None
    size = keys.segment_ids.shape[1] // ring.runs
    lengths = jnp.sum(keys.segment_ids.reshape(-1, size) > 0, 1, dtype=jnp.int32)
    k, v = (backwards(x.reshape(-1, size, *x.shape[2:]), lengths).reshape(x.shape) for x in keys[:2])
    return keys._replace(k=k, v=v)


def _merged(ring: Ring, q: Array, keys: Keys) -> tuple[Partial, Array]:
    """The output with its log-sum-exp, and whether ids rise."""
    assert keys.segment_ids is not None
    rise = documents_rise(ring, keys.segment_ids)

    def by_documents(q: Array, keys: Keys) -> Partial:
        own = attend(_own(ring, q), q, keys.segment_ids, keys, ring.options, None)
        return partial_ring_attention(_between(ring), q, _turned(ring, keys), own)

    def by_ids(q: Array, keys: Keys) -> Partial:
        return partial_ring_attention(replace(ring, implementation="xla"), q, keys)

    return lax.cond(rise, by_documents, by_ids, q, keys), rise


def _primal(ring: Ring, q: Float[Array, "B T H K"], keys: Keys) -> Float[Array, "B T H K"]:
    return _merged(ring, q, keys)[0].o.astype(q.dtype)


def _forward(ring: Ring, q: Array, keys: Keys) -> tuple[Array, Any]:
    (o, lse), rise = _merged(ring, q, keys)
    o = checkpoint_name(o.astype(q.dtype), SAVED_OUT)
    lse, rise = checkpoint_name((lse, rise), SAVED_LSE)
    return o, (q, keys, Partial(o, lse), rise)


def _backward(ring: Ring, saved: Any, do: Float[Array, "B T H K"]) -> tuple[Array, Keys]:
    *arrays, rise = saved

    def by_documents(q: Array, keys: Keys, merged: Partial, do: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = tile_gradients(_own(ring, q), q, keys.segment_ids, keys, merged, do, ring.options)
        start = _turned(ring, keys._replace(k=dk, v=dv))
        dq, dk, dv = ring_gradients(
            _between(ring), q, _turned(ring, keys), merged, do, (dq, start.k, start.v)
        )
        back = _turned(ring, keys._replace(k=dk, v=dv))
        return dq, back.k, back.v

    def by_ids(q: Array, keys: Keys, merged: Partial, do: Array) -> tuple[Array, Array, Array]:
        return ring_gradients(replace(ring, implementation="xla"), q, keys, merged, do)

    dq, dk, dv = lax.cond(rise, by_documents, by_ids, *arrays, do)
    return dq, Keys(dk, dv, None)


packed_ring_attention = OwnGradient(_primal, nondiff_argnums=(0,))
"""`ring_attention` of a causal ring to keys with ids, the content of every run first in q and keys."""
packed_ring_attention.defvjp(_forward, _backward)
