"""Windowed attention over a split sequence: a halo of keys from the neighbours instead of a ring.

A window of w positions reaches w - 1 keys beyond a device's own. In the tile of the first w - 1 queries and the
last w - 1 keys of the device before, query t sees key s iff s >= t: a causal mask with both read backwards,
which kernels have natively.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxblt.parallel.attention.ring import SAVED_LSE, SAVED_OUT
from jaxblt.parallel.attention.tiles import Keys, Tile, add_at, attend, tile_gradients
from jaxblt.parallel.sequence import SeqAxis
from pallas_kernels.attention import Partial
from pallas_kernels.runtime import OwnGradient


@dataclass(frozen=True)
class Band:
    """What the compiler knows: `window` counts the token's own position, and both sides if not causal."""

    axis: SeqAxis
    causal: bool
    window: int
    scale: float | None = None
    implementation: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """For every call of the kernel."""
        return {"scale": self.scale, "implementation": self.implementation}


def band_attention(band: Band, q: Float[Array, "B T H K"], keys: Keys) -> Float[Array, "B T H K"]:
    """Exact attention to this device's keys and the halo; call it in an island, with a window within a stretch."""
    return _attend_all(band, q, _sources(band, keys))


def partial_band_attention(band: Band, q: Float[Array, "B T H K"], keys: Keys) -> Partial:
    """`band_attention` in fp32 and with its log-sum-exp, to be merged with more keys; not differentiable."""
    return _merged(band, q, _sources(band, keys))


def _sources(band: Band, keys: Keys) -> tuple[Keys, ...]:
    """This device's keys, and those that the window reaches of the one before and (if not causal) after it."""
    reach, last = band.window - 1, band.axis.size - 1
    sources = [keys]
    if reach:
        tail = jax.tree.map(lambda x: x[:, -reach:], keys)
        sources.append(lax.ppermute(tail, band.axis.name, [(i, i + 1) for i in range(last)]))
    if reach and not band.causal:
        head = jax.tree.map(lambda x: x[:, :reach], keys)
        sources.append(lax.ppermute(head, band.axis.name, [(i + 1, i) for i in range(last)]))
    return tuple(sources)


def _tiles(band: Band, length: int) -> list[Tile]:
    """One for each source: own keys, those from before, those from after."""
    reach, index = band.window - 1, lax.axis_index(band.axis.name)
    own = Tile(0, 0, length, band.causal, band.window)
    before = Tile(0, 0, reach, causal=True, reverse=True, live=index > 0)
    after = Tile(length - reach, 0, reach, causal=True, live=index < band.axis.size - 1)
    return [own, before, after]


def _merged(band: Band, q: Array, sources: tuple[Keys, ...]) -> Partial:
    merged = None
    for held, tile in zip(sources, _tiles(band, q.shape[1]), strict=False):
        merged = attend(tile, q, sources[0].segment_ids, held, band.options, merged)
    assert merged is not None
    return merged


def _primal(band: Band, q: Array, sources: tuple[Keys, ...]) -> Array:
    return _merged(band, q, sources).o.astype(q.dtype)


def _forward(band: Band, q: Array, sources: tuple[Keys, ...]) -> tuple[Array, Any]:
    o, lse = _merged(band, q, sources)
    o = checkpoint_name(o.astype(q.dtype), SAVED_OUT)
    return o, (q, sources, Partial(o, checkpoint_name(lse, SAVED_LSE)))


def _backward(band: Band, saved: Any, do: Array) -> tuple[Array, tuple[Keys, ...]]:
    q, sources, merged = saved
    dq, gradients = jnp.zeros_like(q, jnp.float32), []
    for held, tile in zip(sources, _tiles(band, q.shape[1]), strict=False):
        add_q, dk, dv = tile_gradients(tile, q, sources[0].segment_ids, held, merged, do, band.options)
        dq = add_at(dq, add_q, tile.q_start, 1)
        gradients.append(Keys(dk.astype(held.k.dtype), dv.astype(held.v.dtype), None))
    return dq.astype(q.dtype), tuple(gradients)


_attend_all = OwnGradient(_primal, nondiff_argnums=(0,))
_attend_all.defvjp(_forward, _backward)
