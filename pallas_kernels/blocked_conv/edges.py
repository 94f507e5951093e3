"""The chunk of a row that the Hopper kernels leave to XLA, where T is no multiple of 64: see `_conv.flat_rows`."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._conv.flat_rows import FlatRows
from pallas_kernels._hopper import CHUNK
from pallas_kernels.blocked_conv.hopper import REACH
from pallas_kernels.blocked_conv.tiles import DY, POST, PRE, X, block_of


def convolve_first_chunks(
    flat: FlatRows,
    streams: Mapping[int, Float[Array, "M 64"]],
    taps: Float[Array, "D 64 192"],
    shape: tuple[int, ...],
) -> tuple[Float[Array, "R 64"], Float[Array, "R 64"]]:
    """Return y and U of the chunk that each row begins in.

    `taps` are those of `tiles.matrices`.
    """
    parts = {place: flat.edges(z, shape) for place, z in streams.items()}
    u = _product(parts, X, PRE)
    y = jnp.einsum("dij,bdj->bdi", taps[..., block_of(0)], u, preferred_element_type=jnp.float32)
    if POST in parts:
        y *= parts[POST].astype(y.dtype)
    return y.astype(u.dtype).reshape(-1, CHUNK), u.reshape(-1, CHUNK)


def differentiate_last_chunks(
    flat: FlatRows,
    streams: Mapping[int, Float[Array, "M 64"]],
    written: Sequence[int],
    taps: Float[Array, "D 64 192"],
    shape: tuple[int, ...],
) -> tuple[list[Float[Array, "R 64"]], Float[Array, "D 64 64"]]:
    """Return the streams' gradients at `written`, G, and what is added to dM_0^T.

    They are of the chunk that each row ends in. What its G adds to the gradients of M_1 and M_2 is left to the kernel,
    which is given G.
    """
    parts = {place: flat.edges(z, shape) for place, z in streams.items()}
    u, g = _product(parts, X, PRE), _product(parts, DY, POST)
    du = jnp.einsum("dij,bdi->bdj", taps[..., block_of(0)], g, preferred_element_type=jnp.float32)
    found = {X: du * parts[PRE].astype(du.dtype) if PRE in parts else du}
    if PRE in written:
        found[PRE] = du * parts[X].astype(du.dtype)
    if POST in written:
        before = {
            place: flat.before_edges(streams[place], shape, REACH) for place in (X, PRE) if place in parts
        }
        steps = jnp.concatenate([_product(before, X, PRE), u], 2)
        y = jnp.einsum("dij,bdj->bdi", taps, steps, preferred_element_type=jnp.float32)
        found[POST] = y * parts[DY].astype(y.dtype)
    dmatrix = jnp.einsum("bdi,bdj->dij", g, u, preferred_element_type=jnp.float32)
    chunks = [*(found[place] for place in written), g]
    return [z.astype(u.dtype).reshape(-1, CHUNK) for z in chunks], dmatrix


def _product(streams: Mapping[int, Array], stream: int, gate: int) -> Array:
    return streams[stream] * streams[gate] if gate in streams else streams[stream]
